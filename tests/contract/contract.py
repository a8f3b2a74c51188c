"""Holds one release's source against every patch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from kvpatch.core.ledger import Patch, Site
from kvpatch.core.recognise import DATA, Code, Known
from kvpatch.core.releases import ReleaseFacts

from .relied_on import relied_on
from .source import code_of, method


@dataclass(frozen=True)
class Cell:
    """What becomes of one patch on one release."""

    outcome: Literal["applied", "not needed", "refused"]
    reason: str = ""


def cell(patch: Patch, release: str, facts: ReleaseFacts) -> Cell:
    """The outcome that the release's source decides, as it would be at run time."""
    sites = patch.sites(facts)
    if not sites:
        return Cell("not needed", patch.not_needed)
    drifts = [d for d in (drift(release, s) for s in sites) if d]
    return Cell("refused", "; ".join(drifts)) if drifts else Cell("applied")


def drift(release: str, site: Site) -> str:
    """How a site differs from what the patch expects; empty when it does not."""
    found = method(release, site.module, site.name_in_module)
    if isinstance(found, str):
        return found
    if found.kind != site.kind:
        return f"{site.name} is a {found.kind}, not a {site.kind}"
    if found.parameters != site.parameters:
        expected = ", ".join(site.parameters)
        return f"{site.name} takes ({', '.join(found.parameters)}), not ({expected})"
    return ""


def fingerprints(release: str, facts: ReleaseFacts) -> dict[Code, Known]:
    """The fingerprint of everything that some patch leans on."""
    source, found = code_of(release), relied_on(facts)
    return {
        Code(*code): Known(
            source.fingerprint(*code, facts.package_of(code[0])), tuple(sorted(found[code]))
        )
        for code in sorted(found)
    }


def record(all_of_them: dict[str, dict[Code, Known]]) -> None:
    """Writes what each release changed against the one before, a line for each module."""
    changes: dict[str, dict[str, dict[str, str | None]]] = {}
    before: dict[Code, Known] = {}
    for release, found in all_of_them.items():
        changes[release] = {}
        for code in sorted({*before, *found}):
            if found.get(code) != before.get(code):
                known = found.get(code)
                by_name = changes[release].setdefault(code.module, {})
                by_name[code.name] = None if known is None else str(known)
        before = found
    releases = (f"{json.dumps(release)}: {_lines(found)}" for release, found in changes.items())
    DATA.write_text("{\n" + ",\n".join(releases) + "\n}\n")


def _lines(modules: dict[str, dict[str, str | None]]) -> str:
    lines = (f" {json.dumps(module)}: {json.dumps(names)}" for module, names in modules.items())
    return "{\n" + ",\n".join(lines) + "\n}"
