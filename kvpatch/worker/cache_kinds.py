"""The table of cache kinds, and what a block of each holds; read from every release's source.

An allow-list. A spec class or an attention backend that is not in it may hold anything: its
blocks move whole, between engines alike, and a peer of any other geometry is refused with the
name. tests/contract/test_kinds.py fails where a release has a class that is not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Holds(Enum):
    """The ways in which kvpatch may handle a block."""

    ROWS = "rows of tokens"
    """Cut, paired by token, and zeroed behind the last token."""
    WHOLE = "whole blocks"
    """Moved whole, between equal kernel blocks and equal heads; never cut, never zeroed."""
    STATE = "recurrent state"
    """One for all tokens, in a page of a group of its own (states.py)."""


@dataclass(frozen=True)
class Kind:
    """A kind of cache.

    Attributes:
        contents: of a block, in words, for refusals and docs.
        mixes_heads: whether the heads of a rank are not apart in a block, so that no part of it
            is a rank's that holds fewer.
        is_known: whether it is in the table.
        joins: whether smaller blocks behind one another are a larger one, as those of rows are,
            so that a release that joins these does so rightly.
    """

    holds: Holds
    contents: str
    mixes_heads: bool = False
    is_known: bool = True
    joins: bool = False


ROWS = Kind(Holds.ROWS, "keys and values of each token")
LATENT = Kind(Holds.ROWS, "a latent of each token")
_PACKED = Kind(Holds.ROWS, "keys and values of each token, packed, their scales beside them")
_STATE = Kind(Holds.STATE, "the state behind a block's tokens")
_INDEXER = Kind(Holds.WHOLE, "an indexer's values of all tokens, then their scales")
_COMPRESSED = Kind(Holds.WHOLE, "compressed latents of all tokens, then their scales")
RING = Kind(Holds.WHOLE, "a ring of what is not compressed yet")
_SUMMARY = Kind(Holds.WHOLE, "keys or summaries that stand for several tokens")
_SLOTS = Kind(Holds.WHOLE, "two slots, keys and values of all heads", mixes_heads=True)
_TILES = Kind(Holds.WHOLE, "keys in tiles of a block, packed by the hardware's rules")
_SHUFFLED = Kind(Holds.WHOLE, "shuffled keys and values, in tiles of a whole block")
FP4 = Kind(
    Holds.WHOLE,
    "packed keys of all heads, then their scales, and values likewise",
    mixes_heads=True,
)
SCALES_APART = Kind(
    Holds.WHOLE,
    "keys and values, and beside them scales of other tokens and heads",
    mixes_heads=True,
)
_FP4_BY_HEAD = Kind(Holds.WHOLE, "packed values of all tokens of a head, then their scales")
_POOLED = Kind(Holds.WHOLE, "several positions to a token", joins=True)
#: Of a backend that is made of others whose blocks are not of one kind.
OF_SEVERAL = Kind(Holds.WHOLE, "what two backends hold")
_NONE = Kind(Holds.WHOLE, "nothing of its own")

#: The variable that has AITER's FlashAttention shuffle keys (0.15 on).
SHUFFLES = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"

_BY_KIND: Mapping[Kind, tuple[str, ...]] = {
    ROWS: (
        "AiterFlashAttentionBackend",  # see WITH_VARIABLE
        "CPUAttentionBackend",  # by column or in tiles: registration.py, key_order
        "DifferentialFlashAttentionBackend",
        "DualChunkFlashAttentionBackend",
        "FlashAttentionBackend",
        "FlashAttentionDiffKVBackend",
        "FlashInferBackend",  # see WITH_DTYPE
        "FlexAttentionBackend",
        "HpcAttentionBackend",
        "MiniMaxM3SparseBackend",
        "MiniMaxM3SparseCutlassBackend",
        "MiniMaxM3SparseMSABackend",
        "MiniMaxM3SparseTritonBackend",
        "PallasAttentionBackend",
        "Qwen4ExpQSAFlashAttentionBackend",
        "RocmAiterUnifiedAttentionBackend",
        "Step5SplitKVFlashAttentionBackend",
        "TorchAttentionBackend",  # kvpatch's own, for a CPU (experiments/engines)
        "TorchSDPABackend",
        "TreeAttentionBackend",
        "TritonAttentionBackend",
        "TritonAttentionDiffKVBackend",
        "XFormersAttentionBackend",
        "XFormersBackend",
        "_FA4Backend",
        "_FABackend",
    ),
    _PACKED: (
        "RocmOctaveAttentionBackend",
        "TurboQuantAttentionBackend",
        "UltraQuantAttentionBackend",
    ),
    LATENT: (
        "AMXMLABackend",
        "AiterMLABackend",
        "AiterTritonMLABackend",
        "CPUMLABackend",
        "CacheOnlyAttentionBackend",
        "CutlassMLABackend",
        "DeepseekV32MLASparseBackend",
        "Dots3NotePaddedSparseBackend",
        "Dots3NoteTritonMLABackend",
        "FlashAttnMLABackend",
        "FlashAttnMLASparseBackend",
        "FlashAttnMLASparseFA4Backend",
        "FlashInferMLABackend",
        "FlashInferMLASparseBackend",
        "FlashInferMLASparseSM120Backend",
        "FlashInferMLASparseSM90Backend",
        "FlashInferMLASparseTRTLLMBackend",
        "FlashMLABackend",
        "FlashMLASparseBackend",
        "HYV4FlashMLASparseBackend",
        "MLACommonBackend",
        "ROCMAiterMLASparseBackend",
        "TokenspeedMLABackend",
        "TritonMLABackend",
        "XPUFlashAttnMLABackend",
        "XPUMLASparseBackend",
        "_FlashInferMLASparseBackendBase",
    ),
    _INDEXER: (
        "DeepseekV32IndexerBackend",
        "DeepseekV32ROCmIndexerBackend",
        "DeepseekV41IndexerBackend",
        "DeepseekV41RocmMxfp4IndexerBackend",
        "DeepseekV41SparseIndexerBackend",
        "DeepseekV4CPUIndexerBackend",
        "DeepseekV4IndexerBackend",
        "DeepseekV4RocmMxfp4IndexerBackend",
        "Glm5NextIndexerBackend",
    ),
    _COMPRESSED: (
        "DeepseekSparseSWABackend",
        "DeepseekSparseSWAFlashInferBackend",
        "DeepseekSparseSWAFlashMLABackend",
        "DeepseekV41ROCMAiterMLASparseBackend",
        "DeepseekV41ROCMAiterSparseSWABackend",
        "DeepseekV4CPUSparseBackend",
        "DeepseekV4FlashInferMLASparseBackend",
        "DeepseekV4FlashMLABackend",
        "DeepseekV4FlashMLASparseBackend",
        "DeepseekV4ROCMAiterMLASparseBackend",
        "DeepseekV4SparseMLABackend",
        "DeepseekV4XPUSparseBackend",
        "FlashMLAMegaAttnBackend",
    ),
    _SUMMARY: (
        "MiniMaxM3IndexerAiterBackend",
        "MiniMaxM3IndexerBackend",
        "MiniMaxM3IndexerMSABackend",
        "QSAStateBackend",
        "Step5DSAAttentionBackend",
        "Step5SparseSummaryBackend",
    ),
    _STATE: (
        "BailingLinearAttentionBackend",
        "GDNAttentionBackend",
        "InklingSconvBackend",
        "KimiK3KDAAttentionBackend",
        "KimiK3ROCmKDABackend",
        "LinearAttentionBackend",
        "Mamba1AttentionBackend",
        "Mamba2AttentionBackend",
        "PleShortConvAttentionBackend",
        "ShortConvAttentionBackend",
    ),
    _SLOTS: ("B12xPagedAttentionBackend", "MiniMaxM3SparseAiterPABackend"),
    _TILES: (
        "ROCmFlashAttentionBackend",
        "RocmAttentionBackend",
        "RocmSegmentedAttentionBackend",
    ),
    OF_SEVERAL: ("CompositeAttentionBackend",),
    RING: ("CompressorBackend", "KpoolTailBackend", "Step5CSATailRingBackend"),
    _FP4_BY_HEAD: ("MiniMaxM3SparseMSANvfp4Backend",),
    _NONE: ("PlaceholderAttentionBackend",),
}

#: By the name of the class of the layer's attention backend.
BACKENDS: Mapping[str, Kind] = {name: kind for kind, names in _BY_KIND.items() for name in names}

#: What a backend's blocks hold where a variable of vLLM's is on.
WITH_VARIABLE: Mapping[str, tuple[str, Kind]] = {
    "AiterFlashAttentionBackend": (SHUFFLES, _SHUFFLED),
}

#: Kinds that state two slots to each head, where others that state slots have two to a block.
SLOTS_BY_HEAD = (FP4, _FP4_BY_HEAD)

#: What blocks of any backend hold where the cache's dtype begins so.
WITH_DTYPE: Mapping[str, Kind] = {"nvfp4": FP4, "mxfp4": FP4}

#: What vLLM puts before the name of a backend that it derives from another for a purpose; what
#: their blocks hold is what the other's do.
DERIVES = re.compile(
    r"(ChunkedLocalAttention_(\d+_)+|CrossAttention_|EncoderOnlyAttention_|StaticSink_|FastPrefill)+"
)

#: The same, of those whose blocks hold something else; they join where the other's are of rows.
DERIVED: Mapping[str, Kind] = {"WhisperCausalAttentionWithBlockPooling_": _POOLED}

#: By the name of the class of the layer's spec; None for one that says nothing beside its backend.
SPECS: Mapping[str, Kind | None] = {
    **dict.fromkeys(
        (
            "ChunkedLocalAttentionSpec",
            "CrossAttentionSpec",
            "EncoderOnlyAttentionSpec",
            "FullAttentionSpec",
            "HiddenStateCacheSpec",
            "MLAAttentionSpec",
            "RSWASpec",
            "SinkFullAttentionSpec",
            "SlidingWindowMLASpec",
            "SlidingWindowSpec",
            "TQFullAttentionSpec",
            "UniformTypeKVCacheSpecs",  # of many: its layers' own count
        )
    ),
    "CircularBufferSpec": RING,
    "HiSparseHotSpec": RING,
    "HiSparseResidentSpec": _SUMMARY,
    "KpoolTailSpec": RING,
    "MambaSpec": _STATE,
}


#: Values of ``--kv-cache-dtype`` with which a block holds plain numbers, and no scales.
PLAIN_CACHE_DTYPES = ("auto", "bfloat16", "float16")


def unknown(what: str) -> Kind:
    """The kind of a cache that the table lacks."""
    return Kind(Holds.WHOLE, f"what kvpatch does not know: {what}", is_known=False)
