"""A reference attention backend in plain torch, for caches that vLLM's CPU backend does not have.

That one knows one layout only, with keys by column. This one keeps keys and values in rows, as GPU
backends do, in whichever layout ``VLLM_KV_CACHE_LAYOUT`` names (NHD or HND), for blocks of any
size. Slow, and the same to the last bit whatever the layout: it gathers a request's rows first and
computes afterwards.

An engine gets it with ``--worker-extension-cls`` and :class:`TorchCacheProbe`: importing this
module registers it with vLLM in the place of the CPU's own, because the CPU platform has no other
choice (``--attention-backend CUSTOM`` is not heeded there). For vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

from experiments.engines.lab_probe import LabProbe

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class TorchCacheProbe(LabProbe):
    """The probe; that its module was imported is what brings the backend in."""


@register_backend(AttentionBackendEnum.CPU_ATTN)
class TorchAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """The attention backend, as vLLM asks for one."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float32"]
    # A cache that layers share is then written once, by the layer that owns it.
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """A name out of vLLM's own list, and not the CPU backend's, whose keys lie by column."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TorchAttention]:
        return TorchAttention

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """NHD first, and a layer's blocks side by side before a block's layers."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)


@dataclass(frozen=True)
class TorchMetadata:
    """One step: the requests' places in the batch, lengths and blocks."""

    query_starts: tuple[int, ...]
    lengths: tuple[int, ...]
    blocks: torch.Tensor


class TorchMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Takes what it needs from vLLM's description of a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchMetadata:
        step = common_attn_metadata
        return TorchMetadata(
            tuple(step.query_start_loc[: step.num_reqs + 1].tolist()),
            tuple(step.seq_lens[: step.num_reqs].tolist()),
            step.block_table_tensor[: step.num_reqs],
        )


class TorchAttention(AttentionImpl):  # type: ignore[misc]
    """Causal attention over a paged cache [block, head, token, key and value channels]."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if alibi_slopes or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError("ALiBi, soft caps and encoders are not for this reference")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens, each to its slot; slots below 0 are padding."""
        tokens = slot_mapping.shape[0]
        used = slot_mapping >= 0
        slots = slot_mapping[used].long()
        block_tokens = kv_cache.shape[2]
        rows = torch.cat((key[:tokens][used], value[:tokens][used]), dim=-1)
        kv_cache[slots // block_tokens, :, slots % block_tokens] = rows

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TorchMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # a dry run
            return output
        starts = attn_metadata.query_starts
        for number, length in enumerate(attn_metadata.lengths):
            rows = slice(starts[number], starts[number + 1])
            if rows.start < rows.stop:
                cached = _rows(kv_cache, attn_metadata.blocks[number], length)
                output[rows] = self._attend(query[rows], cached)
        return output

    def _attend(self, query: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """``query`` [query token, head, channel], ``cached`` [token, KV head, key and value]."""
        queries, tokens = query.shape[0], cached.shape[0]
        shared = self.num_heads // self.num_kv_heads
        cached = cached.repeat_interleave(shared, dim=1).transpose(0, 1)
        keys, values = cached.split(self.head_size, dim=-1)
        at = torch.arange(tokens - queries, tokens)[:, None]
        behind = at - torch.arange(tokens)[None, :]
        seen = behind >= 0
        if self.sliding_window is not None:
            seen &= behind < self.sliding_window
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * self.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return (weights @ values).transpose(0, 1)


def _rows(kv_cache: torch.Tensor, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """A request's tokens in order: [token, head, channels], of its own and contiguous."""
    block_tokens = kv_cache.shape[2]
    held = blocks[: -(-tokens // block_tokens)].long()
    gathered = kv_cache[held].transpose(1, 2)  # [block, token, head, channels]
    return gathered.reshape(-1, *gathered.shape[2:])[:tokens].contiguous()
