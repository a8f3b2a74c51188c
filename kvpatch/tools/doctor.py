"""Tells what kvpatch makes of this environment, or of a vLLM that is not installed."""

from __future__ import annotations

import importlib
import platform
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import Path as ZipPath

import kvpatch
from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, ReleaseNotKnown, SettingsError
from kvpatch.core.installed import build_in, installed_build, installed_vllm, vllm_in
from kvpatch.core.recognise import Source, leaning, recognise
from kvpatch.core.releases import facts_named
from kvpatch.guard.allowed_peers import allowed_peers
from kvpatch.observe.status import PatchStatus
from kvpatch.patches import SLUGS

if TYPE_CHECKING:
    from rich.console import Console

#: Distributions that provide NIXL's Python module, the plain name first.
_NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
_STYLES = {"applied": "green", "refused": "red", "off": "yellow"}


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``kvpatch doctor`` shows.

    Attributes:
        found: for JSON.
        patches: a row per patch.
        healthy: True if an engine that is started here, or of that build, has every patch that is
            enabled.
        verdict: the last line that is shown.
        installed: the rows of a table of what is here; empty for another build.
    """

    found: Mapping[str, Any]
    patches: Sequence[PatchStatus]
    healthy: bool
    verdict: str
    installed: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**self.found, "healthy": self.healthy, "verdict": self.verdict}

    def show(self, console: Console) -> None:
        from rich.table import Table

        if self.installed:
            installed = Table(title="kvpatch doctor", show_header=False)
            for row in self.installed.items():
                installed.add_row(*row)
            console.print(installed)
        if self.patches:
            table = Table("patch", "outcome", "why")
            for one in self.patches:
                table.add_row(one.slug, one.outcome, one.reason, style=_STYLES.get(one.outcome))
            console.print(table)
        style = "green" if self.healthy else "red"
        console.print(self.verdict, markup=False, highlight=False, style=style, soft_wrap=True)


def upgrade_to(path: Path) -> Diagnosis:
    """Says what a build would get if it were installed.

    Args:
        path: a wheel, a folder with the package ``vllm`` (a checkout, ``site-packages``), or that
            package.

    Raises:
        BadOptions: it is none of these.
    """
    root = _root(path)
    found = vllm_in(root)
    version = found.version if found else "of unknown version"
    try:
        build = recognise(Source(root), version) if found is None else build_in(root, found)
    except ReleaseNotKnown as error:
        problem = str(error)
        no_rows = {"vllm": version, "problem": problem, "patches": ()}
        return Diagnosis(no_rows, (), False, f"kvpatch refuses this build: {problem}")
    needed = leaning(build.facts.release)
    rows = [
        PatchStatus(slug, "refused", build.moved[slug])
        if slug in build.moved
        else PatchStatus(slug, "applied" if slug in needed else "not needed")
        for slug in SLUGS
    ]
    refused = ",".join(row.slug for row in rows if row.outcome == "refused")
    alone = f" with KVPATCH_DISABLE={refused} alone" if refused else ""
    return Diagnosis(
        {"vllm": str(build), "problem": "", "patches": [asdict(row) for row in rows]},
        rows,
        not refused,
        f"kvpatch works with vLLM {build}{alone}",
    )


def _root(path: Path) -> Path | ZipPath:
    """The folder, or the wheel, in which the package lies."""
    found: list[Path | ZipPath] = [path, *([path.parent] if path.name == "vllm" else [])]
    if path.is_file() and zipfile.is_zipfile(path):
        found = [ZipPath(path)]
    for root in found:
        if root.joinpath("vllm/__init__.py").is_file():
            return root
    raise BadOptions(
        f"--against: expected a wheel or a folder with vllm/__init__.py, found none in {path}",
        "give a wheel of vLLM, a checkout, or the site-packages where it is installed",
    )


def diagnose() -> Diagnosis:
    """Enables kvpatch in this process, imports the connector and reports what came of it."""
    problems, gate = settings.errors(), False
    try:
        allowed_peers()
    except SettingsError as error:
        problems.append(str(error))
    if not problems:  # with them, an engine does not start
        kvpatch.enable()
        connector, gate = _import_connector(), settings.is_enabled()
        status = kvpatch.status()
        refused = [str(patch) for patch in status.patches if patch.outcome == "refused"]
        problems = [*_not_loaded(), *([status.problem] if status.problem else refused)]
        problems += [connector] if connector else []
    status, versions = kvpatch.status(), _versions()
    found = {"versions": versions, "gate": gate, "status": status.as_dict(), "problems": problems}
    rows = {
        **versions,
        "generation": status.generation or "unknown",
        settings.ENABLE: "on" if gate else "off in this environment",
    }
    verdict = "works here" if not problems else f"does not work here: {'; '.join(problems)}"
    return Diagnosis(found, status.patches, not problems, f"kvpatch {verdict}", rows)


def _not_loaded() -> list[str]:
    """Why vLLM's processes do not load kvpatch, or enable it."""
    found, plugins = [], settings.variable("VLLM_PLUGINS")
    if not settings.is_enabled():
        found.append(f"{settings.ENABLE} is not on: set {settings.ENABLE}=true")
    if plugins is not None and "kvpatch" not in plugins.split(","):
        named = f"{plugins},kvpatch" if plugins else "kvpatch"
        found.append(f"VLLM_PLUGINS={plugins!r} does not name kvpatch: set VLLM_PLUGINS={named}")
    return found


def _import_connector() -> str:
    slug = kvpatch.status().generation
    if slug is None:
        return ""  # the status says why
    module = facts_named(slug).connector.module
    try:
        importlib.import_module(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # Importing vLLM runs the user's whole stack: what fails there is a finding.
        return f"{module} cannot be imported: {error!r}"
    return ""


def _versions() -> dict[str, str]:
    """The versions of what kvpatch touches; "not installed" where there is none."""
    return {
        "kvpatch": kvpatch.__version__,
        "vllm": _vllm(),
        "nixl": next((v for v in map(_version, _NIXL) if v), "not installed"),
        **{name: _version(name) or "not installed" for name in ("kvcached", "torch", "wrapt")},
        "python": platform.python_version(),
        "platform": _platform(),
    }


def _vllm() -> str:
    try:
        vllm = installed_vllm()
    except ReleaseNotKnown:
        return "not installed"
    try:
        return f"{vllm.distribution} {installed_build(vllm)}"
    except ReleaseNotKnown:  # the status says why
        return f"{vllm.distribution} {vllm.version}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _platform() -> str:
    machine = f"{platform.system()} {platform.machine()}"
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return machine
    return f"{machine}, device {current_platform.device_type}"
