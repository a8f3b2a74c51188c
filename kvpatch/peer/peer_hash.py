"""A peer's compatibility hash: the version of vLLM and the attention backend that make it.

A release hashes a few facts of an engine, by name, as one JSON object with sorted names. A hash
tells nothing but whether it is the same, so that what may be accepted of a peer is tried until
its hash comes out: versions of vLLM times attention backends. The release compares the two in the
thread of the handshake, before it decodes anything else of the peer: it is handed a hash of its own
that says how another one differs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS, RELEASES, ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.observe.book import Book
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.named_factors")
#: The hashes that are remembered: of more peers than a fleet has kinds of.
_MOST_HASHES = 256
#: Characters; of others nothing is kept.
_HASH_LENGTH = 64

VERSION = "vllm_version"
CONNECTOR_VERSION = "nixl_connector_version"
BACKEND = "attn_backend_name"
CACHE_DTYPE = "cache_dtype"
CROSS_LAYERS = "cross_layers_blocks"
HYBRID = "is_hma_enabled"
SPECULATION = "speculative_config"
MODE = "transfer_mode"

#: Attention backends in all releases with a hash, those first that are met most; CUSTOM is a
#: plugin's. A contract test holds the list against the sources.
BACKENDS = (
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN", "CUSTOM"),
    *("AITER_TRITON_MLA", "AMX_MLA", "B12X", "BAILING_LINEAR_ATTN", "CACHE_ONLY_ATTN"),
    *("CPU_MLA", "CPU_V4_INDEXER", "CPU_V4_MLA_SPARSE", "CUTLASS_MLA", "CUTLASS_MSA"),
    *("CompressorBackend", "DEEPSEEK_SPARSE_SWA", "DEEPSEEK_V32_INDEXER"),
    *("DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_ROCM_MXFP4_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER"),
    *("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V4_ROCM_MXFP4_INDEXER", "DOTS3_NOTE_PADDED_MLA_SPARSE"),
    *("FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_DSV4"),
    *("FLASHINFER_MLA_SPARSE_DSV41", "FLASHINFER_MLA_SPARSE_SM120"),
    *("FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHMLA_SPARSE"),
    *("FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41", "FLASH_ATTN_DIFFKV", "FLASH_ATTN_MLA"),
    *("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4", "GDN_ATTN", "HPC_ATTN"),
    *("INKLING_SCONV_SWA", "KIMI_K3_KDA", "KIMI_K3_KDA_ROCM", "KPOOL_TAIL", "LINEAR_ATTN"),
    *("MAMBA1_ATTN", "MAMBA2_ATTN", "MINIMAX_M3_SPARSE", "MINIMAX_M3_SPARSE_INDEXER", "PALLAS"),
    *("PLE_SHORT_CONV_ATTN", "QWEN4_EXP_EXP_QSA_STATE", "QWEN4_EXP_QSA_TRITON"),
    *("ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN"),
    *("ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41", "ROCM_OCTAVE"),
    *("ROCM_SEGMENTED_ATTN", "ROCM_V4_FLASHMLA_SPARSE", "SHORT_CONV_ATTN", "STEP5_CSA_SUMMARY"),
    *("STEP5_CSA_TAIL_RING", "STEP5_DSA", "TOKENSPEED_MLA", "TREE_ATTN", "TRITON_ATTN_DIFFKV"),
    *("TRITON_MLA", "TRITON_MSA", "TURBOQUANT", "ULTRAQUANT", "V4_FLASHMLA_SPARSE"),
    *("XPU_MLA_SPARSE", "XPU_V4_MLA_SPARSE"),
)

#: vLLM's term for it, which operators search for.
_MISMATCH = "compatibility hash mismatch"
#: Stands for the backend in a text that is hashed with one after the other.
_HOLE = "\0"
#: After each version, in which the engine's own threads go on.
_PAUSE_SECONDS = 0.00005
#: What builds of a release put behind its version.
_LABELS = (
    *("", "+cpu", "+cu129", "+cu128", "+cu130", "+cu126", "+cu124", "+cu118", "+rocm700"),
    *("+rocm710", "+rocm711", "+rocm720", "+rocm721", "+rocm641", "+rocm630", "+xpu", "+tpu"),
    *("+empty", "+precompiled"),
)


@dataclass(frozen=True)
class OwnFactors:
    """The values that this engine's hash is made of, and would be made of in other releases.

    Attributes:
        values: of every factor of any release, but for those that this one cannot tell.
    """

    facts: ReleaseFacts
    values: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The hash that the release makes of them."""
        return digest_of({name: self.values[name] for name in self.facts.hash_factors})

    def __str__(self) -> str:
        names = sorted(self.facts.hash_factors)
        return ", ".join(f"{name} {shown(self.values[name])}" for name in names)


@dataclass(frozen=True)
class Explanation:
    """The engine that a peer is, for its hash to be what it is: like ours but for what differs.

    Attributes:
        version: of its vLLM, as it states it.
        release: of the table, that the version is a build of.
        cache_dtype: the type of both caches.
    """

    version: str
    release: str
    backend: str
    own_version: str
    own_backend: str
    cache_dtype: str

    @property
    def factors(self) -> tuple[str, ...]:
        """Returns what differs, as ``KVPATCH_ACCEPT`` has it."""
        differ = self.version != self.own_version, self.backend != self.own_backend
        return tuple(name for name, is_other in zip(_ON_BOTH, differ, strict=True) if is_other)

    def __str__(self) -> str:
        theirs, ours = self.backend, self.own_backend
        if self.version == self.own_version:
            return f"P runs {theirs}; this engine runs {ours}"
        if theirs == ours:
            return f"P runs vLLM {self.version}; this engine runs {self.own_version}"
        return (
            f"P runs vLLM {self.version} with {theirs}; this engine runs {self.own_version} "
            f"with {ours}"
        )


#: Of each factor that can be accepted, what both sides need else.
_ON_BOTH = {
    "vllm_version": "one release of vLLM",
    "attn_backend": "one attention backend (--attention-backend)",
}


def digest_of(factors: Mapping[str, Any]) -> str:
    """The hash of some factors, as every release makes it."""
    return sha256(_text(factors).encode()).hexdigest()


def explain(own: OwnFactors, peer_hash: str) -> Explanation | None:
    """Finds the version and the backend with which an engine like ours has a peer's hash."""
    own_version, own_backend = own.values[VERSION], own.values[BACKEND]
    backends = dict.fromkeys((own_backend, *BACKENDS))
    for version, facts in _versions(own).items():
        values = {**own.values, VERSION: version, CONNECTOR_VERSION: facts.connector_version}
        values[BACKEND] = _HOLE
        if not facts.hash_factors <= values.keys():
            continue  # it hashes what this release cannot tell of us
        text = _text({name: values[name] for name in facts.hash_factors})
        before, after = text.split(json.dumps(_HOLE))
        for backend in backends:
            if sha256(f'{before}"{backend}"{after}'.encode()).hexdigest() == peer_hash:
                told = version, facts.release, backend, own_version, own_backend
                return Explanation(*told, values[CACHE_DTYPE])
        time.sleep(_PAUSE_SECONDS)
    return None


def _text(factors: Mapping[str, Any]) -> str:
    return json.dumps(factors, sort_keys=True)


def _versions(own: OwnFactors) -> dict[str, ReleaseFacts]:
    """Returns the builds of releases that a peer may have, those first that are met most.

    The own one may be a build that the operator has named a release for.
    """
    version, place = own.values[VERSION], RELEASES.index(own.facts.release)
    own_label = version.removeprefix(version.partition("+")[0])
    releases = [of for of in FACTS.values() if of.states_hash]
    releases.sort(key=lambda of: abs(RELEASES.index(of.release) - place))
    found = {of.release + label: of for label in (own_label, *_LABELS) for of in releases}
    return {version: own.facts} | found | {version: own.facts}


class NamedPeers(threading.local):
    """The accepted peers of a worker's handshakes, which have threads of their own, one each."""

    #: How the peer of this thread's handshake differs; None where it has our hash.
    accepted: Explanation | None = None


class ComparedHash(str):
    """A hash that a peer's is compared with: one that is accepted counts as equal."""

    _accept: Callable[[str | None], None]

    __slots__ = ("_accept",)

    @classmethod
    def of(cls, own: OwnFactors, peers: NamedPeers, book: Book, *, checks: bool) -> ComparedHash:
        """Makes this engine's; `checks` is True if what is accepted is checked here."""

        @lru_cache(_MOST_HASHES)  # a peer that is refused is asked again by each of its requests
        def explained(stated: str) -> Explanation | None:
            return explain(own, stated)

        def accept(stated: str | None) -> None:
            peers.accepted = None
            if stated is not None:
                with book.refusals():
                    found = explained(stated) if len(stated) == _HASH_LENGTH else None
                    peers.accepted = _judged(own, found, checks=checks)

        made = cls(own.digest)
        made._accept = accept
        return made

    def __eq__(self, other: object) -> bool:
        """Raises:
        PeerRefused: the other is a peer's, and its engine differs in what is not accepted.
        """
        if not isinstance(other, str):
            return False
        self._accept(None if str.__eq__(self, other) else str(other))
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _judged(own: OwnFactors, named: Explanation | None, *, checks: bool) -> Explanation:
    """Returns how a peer differs, or refuses it."""
    accepted = settings.accepted_factors()
    if named is None:
        raise PeerRefused(
            f"{_MISMATCH}, and no version of vLLM and no attention backend explains it; this "
            f"engine hashes {own}",
            "compare these with P's (with VLLM_LOGGING_LEVEL=DEBUG its log has a line `NIXL "
            "compatibility hash`), and use one of each on both sides, --model letter by letter",
        )
    if not set(named.factors) <= set(accepted):
        wanted = ",".join(dict.fromkeys((*accepted, *named.factors)))
        raise PeerRefused(
            f"{_MISMATCH}: {named}",
            f"use {' and '.join(_ON_BOTH[name] for name in named.factors)} on both sides, or set "
            f"{settings.ACCEPT}={wanted} here, which goes on where the rest of the handshake fits",
        )
    if not checks:
        raise PeerRefused(
            f"{settings.ACCEPT} accepts what unlike_engines checks, which KVPATCH_DISABLE "
            "turns off",
            "leave it on",
        )
    return named


def compare_by_factor(release: ReleaseWorker, *, checks: bool) -> None:
    """Makes a registered worker explain how a peer's hash differs; the hash it sends stays."""
    own = own_factors(release)
    if own is None:
        _LOG.warning(
            "this engine's compatibility hash is made of something that kvpatch does not know: how "
            "peers differ is not said, and %s accepts nothing",
            settings.ACCEPT,
        )
        return
    state = worker_state(release.worker)
    peers = state.of(NamedPeers)
    release.worker.compat_hash = ComparedHash.of(own, peers, state.book, checks=checks)


def own_factors(release: ReleaseWorker) -> OwnFactors | None:
    """Returns those of a registered worker; None where its hash is made of something else."""
    import vllm

    worker, facts = release.worker, release.facts
    config = worker.vllm_config
    model, cache = config.model_config, config.cache_config
    topology = getattr(worker, facts.topology) if facts.topology else None
    found: dict[str, Any] = {
        VERSION: vllm.__version__,
        CONNECTOR_VERSION: facts.connector_version,
        "model": model.model,
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        BACKEND: worker.backend_name,
        CACHE_DTYPE: str(cache.cache_dtype),
        CROSS_LAYERS: bool(getattr(topology, "cross_layers_blocks", False)),
        HYBRID: not config.scheduler_config.disable_hybrid_kv_cache_manager,
        MODE: "pull",  # of push mode nothing is named
    }
    if SPECULATION in facts.hash_factors or config.speculative_config is None:
        found[SPECULATION] = _speculation(config)
    own = OwnFactors(facts, found)
    try:
        is_known = own.digest == worker.compat_hash
    except TypeError:  # a value of a kind that no release puts into its hash
        return None
    return own if is_known else None


def _speculation(config: Any) -> dict[str, Any] | None:
    """The facts of drafting that count; nothing without a drafter that reads the model's states."""
    drafting = config.speculative_config
    if drafting is None or not drafting.use_eagle():
        return None
    draft = drafting.draft_model_config
    layers = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    found = {name: getattr(draft, name) for name in ("model", "revision", "code_revision")}
    return found | {
        "method": drafting.method,
        "parallel_drafting": drafting.parallel_drafting,
        "kv_cache_dtype": str(drafting.kv_cache_dtype or config.cache_config.cache_dtype),
        "auxiliary_layer_ids": None if layers is None else list(layers),
    }
