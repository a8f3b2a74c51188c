"""What a release's own classes say of the backends that ``kvpatch plan`` knows.

The dimensions of a layer's tensor, their order in memory by layout, and the kernel blocks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from . import release, standins
from .caches import memory_order, probe_dims

CLASSES = {
    "FLASH_ATTN": ("flash_attn", "FlashAttentionBackend", "flash"),
    "FLASHINFER": ("flashinfer", "FlashInferBackend", "flashinfer"),
    "TRITON_ATTN": ("triton_attn", "TritonAttentionBackend", "triton"),
    "CPU_ATTN": ("cpu_attn", "CPUAttentionBackend", "cpu"),
    "TRITON_MLA": ("mla.triton_mla", "TritonMLABackend", "mla"),
    "FLASHMLA": ("mla.flashmla", "FlashMLABackend", "mla"),
    "FLASH_ATTN_MLA": ("mla.flashattn_mla", "FlashAttnMLABackend", "mla"),
}
#: Some releases import these only where their kernels are, or have no such backend.
MAY_BE_MISSING = ("CPU_ATTN", "FLASHMLA", "FLASH_ATTN_MLA")


def shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    """In an engine's process."""
    standins.flashinfer_package()
    for name, (module, owner, family) in CLASSES.items():
        try:
            found = importlib.import_module(f"vllm.v1.attention.backends.{module}")
        except (ImportError, AssertionError):
            if name not in MAY_BE_MISSING:
                raise
            continue
        backend = getattr(found, owner, None)
        if backend is not None:
            yield name, _shape(backend, family)


def _shape(backend: Any, family: str) -> dict[str, Any]:
    dims = probe_dims(backend, family)
    orders = {}
    if hasattr(backend, "get_kv_cache_shape"):
        for layout in ("HND", "NHD"):
            release.use_layout(layout)
            orders[layout] = memory_order(backend, dims, layout)[1:]
    return {
        "name": backend.get_name().removesuffix("_VLLM_V1"),
        "dims": dims,
        "orders": orders,
        "kernel_sizes": _kernel_sizes(backend),
    }


def _kernel_sizes(backend: Any) -> dict[str, list[int]] | None:
    """None where the release does not ask, or the backend asks for a configuration first."""
    try:
        asked = getattr(backend, "get_supported_kernel_block_sizes", None)
        sizes = asked() if asked else getattr(backend, "supported_kernel_block_sizes", None)
    except AssertionError:
        return None
    if sizes is None:
        return None
    exact = [size for size in sizes if isinstance(size, int)]
    return {"exact": exact, "multiples": [s.base for s in sizes if not isinstance(s, int)]}
