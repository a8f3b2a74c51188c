"""The caches of attention backends from vLLM 0.26 on.

tests/lab/test_planned_backends.py compares them with the classes of every release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpatch.core.errors import BadOptions
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.worker.kernel_block_sizes import KernelBlockSizes
from kvpatch.worker.release_worker import LATENT, LATENT_HEADS, PACKED


@dataclass(frozen=True)
class Backend:
    """One attention backend.

    Attributes:
        device: "cuda" for the backends of CUDA and ROCm alike.
        is_mla: True if it holds latents.
        exact: the kernel blocks that it takes; empty where it takes multiples of a number.
        default_tokens: of a block, by default.
        fp8: the words of ``--kv-cache-dtype`` for items of one byte that it takes.
    """

    name: str
    device: str = "cuda"
    is_mla: bool = False
    exact: tuple[int, ...] = ()
    default_tokens: int = 16
    fp8: tuple[str, ...] = ("fp8", "fp8_e4m3")

    def kernel_sizes(self, facts: ReleaseFacts) -> KernelBlockSizes:
        """Returns the sizes of kernel blocks that a release cuts blocks into."""
        base = 32 if self.device == "cpu" and facts.names_layouts else 16
        return KernelBlockSizes((self.exact,), (() if self.exact else (base,),))

    def order(self, facts: ReleaseFacts) -> DimensionOrder:
        """Returns the meanings of the dimensions of a layer's tensor."""
        latent = LATENT_HEADS if facts.names_layouts else LATENT
        return latent if self.is_mla else PACKED


_WITH_E5M2 = ("fp8", "fp8_e4m3", "fp8_e5m2")
BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN"),
        Backend("FLASHINFER", exact=(16, 32, 64), fp8=_WITH_E5M2),
        Backend("TRITON_ATTN", fp8=_WITH_E5M2),
        Backend("CPU_ATTN", "cpu", default_tokens=128, fp8=_WITH_E5M2),
        Backend("TRITON_MLA", is_mla=True),
        Backend("FLASHMLA", is_mla=True, exact=(64,), default_tokens=64),
        Backend("FLASH_ATTN_MLA", is_mla=True, fp8=()),
    )
}
#: By device, the backend that vLLM most likely chooses for keys and values.
_DEFAULTS = {"cpu": "CPU_ATTN", "cuda": "FLASH_ATTN"}


def backend_named(name: str | None, device: str, *, is_mla: bool) -> Backend:
    """Finds a backend by its name, or the default one; raises :class:`BadOptions` for others."""
    if name is None and not is_mla:
        name = _DEFAULTS.get(device)
    if name is None:
        raise BadOptions(
            f"not planned for: the attention backend that vLLM chooses on this {device}",
            "write attention-backend into the section kvpatch, and block-size (the log of vLLM "
            'says "Using ... backend")',
        )
    found = BACKENDS.get(name.upper())
    if found is None or found.is_mla != is_mla:
        what = "latents (MLA)" if is_mla else "keys and values"
        known = (one.name for one in BACKENDS.values() if one.is_mla == is_mla)
        raise BadOptions(
            f"not planned for: {what} of the attention backend {name}",
            f"use one of {', '.join(known)}",
        )
    return found
