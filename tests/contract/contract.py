"""Holds one release's source against every patch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvpatch.core.ledger import Patch, Site
from kvpatch.core.releases import ReleaseFacts

from .relied_on import bodies
from .source import Method, method

FINGERPRINTS = Path(__file__).with_name("fingerprints.json")


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
    name = f"{site.owner}.{site.name}"
    found = method(release, site.module, name)
    if isinstance(found, str):
        return found
    if found.kind != site.kind:
        return f"{site.name} is a {found.kind}, not a {site.kind}"
    if found.parameters != site.parameters:
        expected = ", ".join(site.parameters)
        return f"{site.name} takes ({', '.join(found.parameters)}), not ({expected})"
    return ""


def fingerprints(release: str, facts: ReleaseFacts) -> dict[str, str]:
    """The fingerprint of every body that some patch leans on; a clause where there is none."""
    found: dict[str, Method | str] = {
        f"{module}:{name}": method(release, module, name) for module, name in bodies(facts)
    }
    return {k: m if isinstance(m, str) else m.fingerprint for k, m in found.items()}


def recorded() -> dict[str, dict[str, str]]:
    """The committed fingerprints, by release."""
    found: dict[str, dict[str, str]] = json.loads(FINGERPRINTS.read_text())
    return found


def record(all_of_them: dict[str, dict[str, str]]) -> None:
    """Commits fingerprints: after the bodies behind them have been read."""
    FINGERPRINTS.write_text(json.dumps(all_of_them, indent=1) + "\n")
