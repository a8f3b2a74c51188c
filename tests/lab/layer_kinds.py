"""Kinds of cache that a lab engine's layers can be of, beside its family's own.

What is the release's: the backend, which customizes the spec where it does so for a model, the
spec's class, the plan, and the tensors (from 0.29, where the release lays out its plan itself). The
lab's: that the model is a list of such layers. Fields of specs are those that the models give which
are named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from .kinds import (
    fp4_planes,
    fp4_planes_by_head,
    rows_of_states,
    split_slots,
    tile_planes,
    values_then_scales,
)

if TYPE_CHECKING:
    from .case import EngineSpec
    from .compare import Array


@dataclass(frozen=True)
class LayerKind:
    """One kind.

    Attributes:
        backend: the class of a layer's attention backend.
        spec: the class of its spec.
        fields: of the spec, beside the block size.
        planes: a tensor's contents, each [block, row, head, item].
        row_tokens: how many tokens of a prompt a row stands for; 0 where all of them have one
            block, a ring.
        has_heads: whether ranks have the heads between them; else each has all of it.
        cache_dtype: what --kv-cache-dtype is, where there is one for it.
    """

    backend: Callable[[], Any]
    spec: str
    fields: Callable[[EngineSpec], Mapping[str, Any]]
    planes: Callable[[torch.Tensor, EngineSpec], tuple[Array, ...]]
    row_tokens: int = 1
    has_heads: bool = False
    cache_dtype: str = ""

    def rows(self, tokens: range, block_tokens: int) -> range:
        """The rows of these tokens that are whole; of a ring all of its block."""
        if not self.row_tokens:
            return range(block_tokens if tokens else 0)
        return range(tokens.start // self.row_tokens, tokens.stop // self.row_tokens)

    def rows_per_block(self, block_tokens: int) -> int:
        return block_tokens // (self.row_tokens or 1)


def _named(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"vllm.{module}"), name)


def _quantization(dtype: str) -> Any:
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    return get_kv_quant_mode(dtype)


# -- DeepSeek-V4: four tokens to a latent, beside an indexer, a window and a compressor's state ----

#: Of a latent: 448 values of a byte and 64 of two; and its scales.
_LATENT_BYTES, _LATENT_SCALES = 576, 8
_COMPRESSED_TOKENS = 4
_DS_MLA = {
    "num_kv_heads": 1,
    "head_size": 512,
    "dtype": torch.uint8,
    "cache_dtype_str": "fp8_ds_mla",
    "alignment": 576,
    "model_version": "deepseek_v4",
    "state_content_bytes": _LATENT_BYTES + _LATENT_SCALES,
}


def _latents(tensor: torch.Tensor, spec: EngineSpec) -> tuple[Array, ...]:
    return values_then_scales(tensor, _LATENT_BYTES, _LATENT_SCALES)


COMPRESSED = LayerKind(
    _named("models.deepseek_v4.sparse_mla", "DeepseekV4FlashMLABackend"),
    "MLAAttentionSpec",
    lambda spec: {
        **_DS_MLA,
        "tokens_per_state": _COMPRESSED_TOKENS,
        "compress_ratio": _COMPRESSED_TOKENS,  # <= 0.28
        "kv_quant_mode": _quantization("fp8_ds_mla"),
    },
    _latents,
    row_tokens=_COMPRESSED_TOKENS,
)
COMPRESSED_INDEXER = LayerKind(
    _named("v1.attention.backends.mla.indexer", "DeepseekV4IndexerBackend"),
    "MLAAttentionSpec",
    lambda spec: {
        "num_kv_heads": 1,
        "head_size": 132,
        "dtype": torch.uint8,
        "tokens_per_state": _COMPRESSED_TOKENS,
        "compress_ratio": _COMPRESSED_TOKENS,  # <= 0.28
        "alignment": 576,
    },
    lambda tensor, spec: values_then_scales(tensor, 128, 4),
    row_tokens=_COMPRESSED_TOKENS,
)
WINDOW = LayerKind(
    _named("v1.attention.backends.mla.sparse_swa", "DeepseekSparseSWABackend"),
    "SlidingWindowMLASpec",
    lambda spec: {**_DS_MLA, "sliding_window": 128, "kv_quant_mode": _quantization("fp8_ds_mla")},
    _latents,
)
COMPRESSOR = LayerKind(
    _named("models.deepseek_v4.compressor", "CompressorBackend"),
    "SlidingWindowMLASpec",
    lambda spec: {
        "num_kv_heads": 1,
        "head_size": 2048,
        "dtype": torch.float32,
        "sliding_window": 2 * _COMPRESSED_TOKENS,
        "alignment": 576,
    },
    rows_of_states,
)

# -- Qwen4's QSA: a ring of raw keys a request, and one key for four tokens -----------------------

_QSA = _named("models.qwen4_exp.common.qsa_cache", "QSAStateBackend")
RING = LayerKind(
    _QSA,
    "CircularBufferSpec",
    lambda spec: {"num_kv_heads": 1, "head_size": 64, "head_size_v": 0, "dtype": torch.bfloat16},
    rows_of_states,
    row_tokens=0,
)
SUMMARY = LayerKind(
    _QSA,
    "MLAAttentionSpec",
    lambda spec: {
        "num_kv_heads": 1,
        "head_size": 64,
        "dtype": torch.bfloat16,
        "tokens_per_state": 4,
    },
    rows_of_states,
    row_tokens=4,
)

# -- MiniMax-M3's indexer: a key of each token, by whose blocks the sparse attention chooses ------


def _of_minimax(module: str, name: str) -> Callable[[], Any]:
    def backend() -> Any:
        from .standins import flashinfer_package, vision_package

        vision_package()
        flashinfer_package()
        return _named(f"models.minimax_m3.{module}", name)()

    return backend


def _minimax_fields(spec: EngineSpec) -> Mapping[str, Any]:
    from vllm.v1 import kv_cache_interface as interface

    found = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    roles = getattr(interface, "SparseCacheRole", None)  # from 0.30
    return found if roles is None else {**found, "cache_role": roles.INDEXER}


INDEXER_KEYS = LayerKind(
    _of_minimax("common.indexer", "MiniMaxM3IndexerBackend"),
    "MLAAttentionSpec",
    _minimax_fields,
    rows_of_states,
)

# -- kinds of an engine's every layer, whose heads are the ranks' ----------------------------------


def _of_heads(**more: Any) -> Callable[[EngineSpec], Mapping[str, Any]]:
    def fields(spec: EngineSpec) -> Mapping[str, Any]:
        dtype = {"num_kv_heads": spec.heads_per_rank, "head_size": spec.head_dim}
        return {**dtype, "dtype": torch.bfloat16, **more}

    return fields


def _tiles(tensor: torch.Tensor, spec: EngineSpec) -> tuple[Array, ...]:
    return tile_planes(*split_slots(tensor), spec.heads_per_rank, spec.head_dim)


TILES = LayerKind(
    _named("v1.attention.backends.rocm_attn", "RocmAttentionBackend"),
    "FullAttentionSpec",
    _of_heads(),
    _tiles,
    has_heads=True,
)


def _nvfp4() -> Any:
    from .release import backend

    return backend("flashinfer")


def _fp4_fields(spec: EngineSpec) -> Mapping[str, Any]:
    return _of_heads(dtype=torch.uint8, kv_quant_mode=_quantization("nvfp4"))(spec)


FP4 = LayerKind(
    _nvfp4,
    "FullAttentionSpec",
    _fp4_fields,
    lambda tensor, spec: fp4_planes(tensor),
    has_heads=True,
    cache_dtype="nvfp4",
)


FP4_BY_HEAD = LayerKind(
    _of_minimax("nvidia.sparse_attention_msa", "MiniMaxM3SparseMSANvfp4Backend"),
    "FullAttentionSpec",
    _fp4_fields,
    lambda tensor, spec: fp4_planes_by_head(tensor),
    has_heads=True,
    cache_dtype="nvfp4",
)


def _packed_fields(spec: EngineSpec) -> Mapping[str, Any]:
    mode = _quantization("turboquant_4bit_nc")
    return _of_heads(dtype=torch.uint8, kv_quant_mode=mode)(spec)


PACKED = LayerKind(
    _named("v1.attention.backends.turboquant_attn", "TurboQuantAttentionBackend"),
    "FullAttentionSpec",
    _packed_fields,
    rows_of_states,
    has_heads=True,
    cache_dtype="turboquant_4bit_nc",
)

#: Positions of Whisper's encoder to a token.
POSITIONS = 4


def _pooled_backend() -> Any:
    whisper = importlib.import_module("vllm.model_executor.models.whisper_causal")
    flash = importlib.import_module("vllm.v1.attention.backends.flash_attn").FlashAttentionBackend
    return whisper.create_whisper_attention_backend_with_block_pooling(flash, POSITIONS)


POOLED = LayerKind(
    _pooled_backend,
    "FullAttentionSpec",
    _of_heads(tokens_per_state=Fraction(1, POSITIONS)),
    lambda tensor, spec: rows_of_states(tensor, spec, POSITIONS),
    has_heads=True,
)
POOLED_WINDOW = replace(
    POOLED,
    spec="SlidingWindowSpec",
    fields=lambda spec: {**POOLED.fields(spec), "sliding_window": 64},  # in tokens
)
COMPOSITE = LayerKind(
    _named("v1.attention.backends.triton_flash_attn", "TritonFlashAttentionBackend"),
    "FullAttentionSpec",
    _of_heads(),
    rows_of_states,
    has_heads=True,
)

KINDS: Mapping[str, LayerKind] = {
    "compressed": COMPRESSED,
    "compressed indexer": COMPRESSED_INDEXER,
    "window of latents": WINDOW,
    "compressor": COMPRESSOR,
    "ring": RING,
    "summary": SUMMARY,
    "indexer keys": INDEXER_KEYS,
    "tiles": TILES,
    "fp4": FP4,
    "fp4 by head": FP4_BY_HEAD,
    "packed": PACKED,
    "pooled": POOLED,
    "pooled window": POOLED_WINDOW,
    "composite": COMPOSITE,
}
