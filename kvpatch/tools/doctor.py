"""Tells what kvpatch makes of this environment, or of a vLLM that is not installed."""

from __future__ import annotations

import importlib
import platform
import zipfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import Path as ZipPath

import kvpatch
from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, ReleaseNotKnown, SettingsError
from kvpatch.core.installed import installed_build, installed_vllm, vllm_in
from kvpatch.core.recognise import leaning, recognise
from kvpatch.core.releases import Build, facts_named, listed
from kvpatch.core.source import Source
from kvpatch.guard.allowed_peers import allowed_peers
from kvpatch.observe.status import PatchStatus, Status
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
        versions: of what kvpatch touches; "not installed" where it is missing.
        gate: the value of ``ENABLE_KVPATCH``, as kvpatch takes it.
        status: the outcome of enabling kvpatch here, now.
        problems: why an engine of this environment runs without kvpatch, or does not start.
    """

    versions: dict[str, str]
    gate: bool
    status: Status
    problems: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """True if an engine that is started here has every patch that is enabled."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """The last line that is shown."""
        if self.healthy:
            return "kvpatch works here"
        return f"kvpatch does not work here: {'; '.join(self.problems)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "healthy": self.healthy, "verdict": self.verdict}

    def show(self, console: Console) -> None:
        """Prints tables, and the verdict."""
        from rich.table import Table

        installed = Table(title="kvpatch doctor", show_header=False)
        rows = {
            **self.versions,
            "generation": self.status.generation or "unknown",
            settings.ENABLE: "on" if self.gate else "off in this environment",
        }
        for row in rows.items():
            installed.add_row(*row)
        console.print(installed)
        _show_patches(self.status.patches, self, console)


@dataclass(frozen=True)
class Upgrade:
    """The patches that a build would get.

    Attributes:
        vllm: its version, and the release that it is taken for.
        problem: why it is refused, or empty.
        patches: a row per patch; none where the build is refused.
    """

    vllm: str
    problem: str
    patches: tuple[PatchStatus, ...]

    @property
    def healthy(self) -> bool:
        """True if it gets every patch."""
        return not self.problem and all(p.outcome != "refused" for p in self.patches)

    @property
    def verdict(self) -> str:
        """The last line that is shown."""
        if self.problem:
            return f"kvpatch refuses this build: {self.problem}"
        refused = ",".join(p.slug for p in self.patches if p.outcome == "refused")
        alone = f" with KVPATCH_DISABLE={refused} alone" if refused else ""
        return f"kvpatch works with vLLM {self.vllm}{alone}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "healthy": self.healthy, "verdict": self.verdict}

    def show(self, console: Console) -> None:
        """Prints a table, and the verdict."""
        _show_patches(self.patches, self, console)


def _show_patches(
    patches: tuple[PatchStatus, ...], found: Diagnosis | Upgrade, console: Console
) -> None:
    from rich.table import Table

    table = Table("patch", "outcome", "why")
    for row in patches:
        table.add_row(row.slug, row.outcome, row.reason, style=_STYLES.get(row.outcome))
    if patches:
        console.print(table)
    style = "green" if found.healthy else "red"
    console.print(found.verdict, markup=False, highlight=False, style=style, soft_wrap=True)


def upgrade_to(path: Path) -> Upgrade:
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
    facts = listed(version)
    try:
        build = recognise(Source(root), version) if facts is None else Build(version, facts)
    except ReleaseNotKnown as error:
        return Upgrade(version, str(error), ())
    needed = leaning(build.facts.release)
    rows = (
        PatchStatus(slug, "refused", build.moved[slug])
        if slug in build.moved
        else PatchStatus(slug, "applied" if slug in needed else "not needed")
        for slug in SLUGS
    )
    return Upgrade(str(build), "", tuple(rows))


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
    wrong = _settings_errors()
    if wrong:  # an engine does not start with them
        return Diagnosis(_installed(), False, kvpatch.status(), tuple(wrong))
    kvpatch.enable()
    connector = _import_connector()
    status = kvpatch.status()
    refused = [str(patch) for patch in status.patches if patch.outcome == "refused"]
    found = (*_not_loaded(), *([status.problem] if status.problem else refused), connector)
    return Diagnosis(_installed(), settings.is_enabled(), status, tuple(filter(None, found)))


def _settings_errors() -> list[str]:
    found = settings.errors()
    try:
        allowed_peers()
    except SettingsError as error:
        found.append(str(error))
    return found


def _not_loaded() -> list[str]:
    """Why vLLM's processes do not load kvpatch, or enable it."""
    found, plugins = [], settings.vllm_plugins()
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


def _installed() -> dict[str, str]:
    return {
        "kvpatch": kvpatch.__version__,
        "vllm": _vllm(),
        "nixl": next((v for v in map(_version, _NIXL) if v), "not installed"),
        "kvcached": _version("kvcached") or "not installed",
        "torch": _version("torch") or "not installed",
        "wrapt": _version("wrapt") or "not installed",
        "python": platform.python_version(),
        "platform": _platform(),
    }


def _vllm() -> str:
    try:
        vllm = installed_vllm()
    except ReleaseNotKnown:
        return "not installed"
    try:
        return f"{vllm.distribution} {installed_build()}"
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
