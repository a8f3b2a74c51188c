"""Shows what kvpatch finds in this environment, and what it can do with it."""

from __future__ import annotations

import importlib
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import kvpatch
from kvpatch.core import settings
from kvpatch.core.errors import ReleaseNotKnown, SettingsError
from kvpatch.core.installed import installed_build, installed_vllm
from kvpatch.core.releases import facts_named
from kvpatch.guard.allowed_peers import allowed_peers
from kvpatch.observe.status import PatchStatus, Status

#: Distributions that provide NIXL's Python module, the plain name first.
_NIXL = ("nixl", "nixl-cu12", "nixl-cu13")


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``kvpatch doctor`` shows.

    Attributes:
        versions: of what kvpatch touches; "not installed" where it is missing.
        gate: the value of ``ENABLE_KVPATCH``, as kvpatch takes it.
        settings: variables that decide how caches travel, as kvpatch takes them.
        status: the outcome of enabling kvpatch here, now.
        problems: why an engine of this environment runs without kvpatch, or does not start.
    """

    versions: dict[str, str]
    gate: bool
    settings: dict[str, str]
    status: Status
    problems: tuple[str, ...]

    @property
    def patches(self) -> tuple[PatchStatus, ...]:
        """A row per patch."""
        return self.status.patches

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
        return {
            **asdict(self),
            "status": self.status.as_dict(),
            "healthy": self.healthy,
            "verdict": self.verdict,
        }


def diagnose() -> Diagnosis:
    """Enables kvpatch in this process, imports the connector and reports what came of it."""
    wrong = _settings_errors()
    if wrong:  # an engine does not start with them
        return Diagnosis(_installed(), False, {}, kvpatch.status(), tuple(wrong))
    kvpatch.enable()
    connector = _import_connector()
    status = kvpatch.status()
    refused = [str(patch) for patch in status.patches if patch.outcome == "refused"]
    found = (*_not_loaded(), *([status.problem] if status.problem else refused), connector)
    return Diagnosis(
        _installed(), settings.is_enabled(), settings_in_use(), status, tuple(filter(None, found))
    )


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


def settings_in_use() -> dict[str, str]:
    """The variables that decide how caches travel.

    Raises:
        SettingsError: one of them holds a value that kvpatch cannot take.
    """
    return {
        settings.HOST_BUFFER: settings.host_buffer(),
        settings.HOST_BUFFER_BYTES: (
            f"{settings.host_buffer_bytes()} a worker at most, or its KV cache"
        ),
    }


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
