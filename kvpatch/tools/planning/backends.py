"""The cache of an attention backend, by release: shape, order in memory, kernel blocks.

tests/lab/test_planned_backends.py compares it with the classes of every release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpatch.core.errors import CannotPlan
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.layout_strides import InnerLayout
from kvpatch.worker.kernel_block_sizes import KernelBlockSizes
from kvpatch.worker.release_worker import (
    BLOCKS_FIRST,
    KEYS_FIRST,
    LATENT,
    LATENT_HEADS,
    PACKED,
)

#: A CPU's before it was packed: a head's tokens are in one piece whatever layout is stated.
_CPU_KEYS_FIRST = DimensionOrder(("kv", "block", "head", "token", "channel"))

#: The blocks that a configuration may have, where it lists them (``lists_block_sizes``).
_LISTED = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Backend:
    """One attention backend.

    Attributes:
        name: as vLLM and its handshake call it.
        device: "cuda" for the backends of CUDA and ROCm alike.
        is_mla: True if it holds latents.
        exact: the kernel blocks that it takes; empty where it takes multiples of a number.
        default_tokens: of a block, by default.
    """

    name: str
    device: str = "cuda"
    is_mla: bool = False
    exact: tuple[int, ...] = ()
    default_tokens: int = 16

    def kernel_sizes(self, facts: ReleaseFacts) -> KernelBlockSizes:
        """Returns the sizes of kernel blocks that a release cuts blocks into."""
        exact = self.exact
        if self.name == "FLASH_ATTN" and facts.cuts_blocks and not facts.asks_for_kernel_sizes:
            exact = (16, 32, 64)  # 0.11.1 and 0.11.2
        bases = () if exact else (self._base(facts),)
        return KernelBlockSizes((exact,), (bases,), _LISTED if facts.lists_block_sizes else None)

    def _base(self, facts: ReleaseFacts) -> int:
        """Returns the number whose multiples it takes."""
        if self.device == "cpu":
            if facts.names_layouts:
                return 32
            return 16 if facts.states_kernel_blocks else 1
        return 16 if facts.has_cache_groups or self.name != "TRITON_MLA" else 1

    def order(self, facts: ReleaseFacts) -> DimensionOrder:
        """Returns the meanings of the dimensions of a layer's tensor."""
        if self.is_mla:
            return LATENT_HEADS if facts.names_layouts else LATENT
        if self.device == "cpu":
            return _CPU_KEYS_FIRST if facts.cache_shape == "keys first" else PACKED
        if facts.cache_shape == "packed":
            return PACKED
        is_triton = self.name == "TRITON_ATTN" and facts.has_bytes_by_region
        has_both = self.name == "FLASHINFER" or is_triton or facts.cache_shape == "blocks first"
        return BLOCKS_FIRST if has_both else KEYS_FIRST

    def inner_layout(self, asked: InnerLayout, facts: ReleaseFacts) -> InnerLayout:
        """Returns the order of heads and tokens; ``<= 0.19`` Triton ignores the layout."""
        if self.device == "cpu":
            return "HND"
        ignores = self.name == "TRITON_ATTN" and facts.topology != "transfer_topo"
        return "NHD" if ignores else asked

    def is_unregistered(self, facts: ReleaseFacts) -> bool:
        """True if the release takes its blocks for a layer's keys and values (0.11.0's Triton)."""
        if facts.states_block_size or self.is_mla or self.name == "FLASHINFER":
            return False  # from 0.11.1 on it looks at the shape
        return self.order(facts) == BLOCKS_FIRST

    @property
    def key_order(self) -> KeyOrder:
        """The order of keys in a block, where they are not in tiles."""
        by_column = self.device == "cpu" and not self.is_mla
        return KeyOrder.COLUMN_MAJOR if by_column else KeyOrder.ROW_MAJOR


_BACKENDS = (
    Backend("FLASH_ATTN"),
    Backend("FLASHINFER", exact=(16, 32, 64)),
    Backend("TRITON_ATTN"),
    Backend("CPU_ATTN", "cpu", default_tokens=128),
    Backend("TRITON_MLA", is_mla=True),
    Backend("FLASHMLA", is_mla=True, exact=(64,), default_tokens=64),
    Backend("FLASH_ATTN_MLA", is_mla=True),
)
BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in _BACKENDS}

#: By device, and True for latents; the backend of latents depends on the card.
_DEFAULTS = {
    ("cpu", False): "CPU_ATTN",
    ("cuda", False): "FLASH_ATTN",
}


def backend_named(name: str) -> Backend:
    """Finds a backend by its name, or by its name in an older release.

    Raises:
        CannotPlan: its cache is not known here.
    """
    plain = name.upper().removesuffix("_VLLM_V1")
    if plain in BACKENDS:
        return BACKENDS[plain]
    raise CannotPlan(
        f"not planned for: the attention backend {name}", f"use one of {', '.join(BACKENDS)}"
    )


def default_backend(device: str, *, is_mla: bool) -> Backend:
    """Returns the backend that vLLM most likely chooses.

    Raises:
        CannotPlan: that depends on the card, or is not known here.
    """
    name = _DEFAULTS.get((device, is_mla))
    if name is None:
        raise CannotPlan(
            f"not planned for: the backend that vLLM chooses on {device}"
            f"{' for latents (MLA)' if is_mla else ''}",
            "write attention-backend into the section kvpatch, and block-size (the log of vLLM "
            'says "Using ... backend")',
        )
    return BACKENDS[name]
