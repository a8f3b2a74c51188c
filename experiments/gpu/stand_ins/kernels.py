"""Stand-ins for vLLM's compiled kernels where its Python alone serves on CUDA, in torch.

A dense model needs few of them beside Triton's attention. Each question whether a kernel is there
is answered with no. `missing_packages.py` has this module imported in place of the compiled ones.
"""

from __future__ import annotations

from typing import Any

import torch

_ASKED = (
    "cutlass_scaled_mm_supports_fp4",
    "mxfp4_experts_quant_supported",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
    "cutlass_sparse_scaled_mm_supported",
)
_LIBRARIES: list[Any] = []


def _silu_and_mul(out: Any, x: Any) -> None:
    half = x.shape[-1] // 2
    out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])


def _normal(x: Any, weight: Any, epsilon: float, dtype: Any) -> Any:
    x = x.float()
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)).to(dtype)
    return x if weight is None else x * weight


def _rms_norm(out: Any, x: Any, weight: Any, epsilon: float) -> None:
    out.copy_(_normal(x, weight, epsilon, x.dtype))


def _fused_add_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normal(total, weight, epsilon, x.dtype))


def _rotary(
    positions: Any, query: Any, key: Any, head_size: int, cache: Any, is_neox: bool,
    rope_dim_offset: int = 0, inverse: bool = False,
) -> None:  # fmt: skip
    cos, sin = (
        part.unsqueeze(1) for part in cache.index_select(0, positions.flatten()).chunk(2, -1)
    )
    sin = -sin if inverse else sin
    size = cache.shape[-1]
    for one in (query, key):
        if one is None:
            continue
        rows = one.view(positions.numel(), -1, head_size)
        rows = rows[..., rope_dim_offset : rope_dim_offset + size]
        halves = (slice(None, size // 2), slice(size // 2, None))
        by_turns = (slice(None, None, 2), slice(1, None, 2))
        a, b = (rows[..., part] for part in (halves if is_neox else by_turns))
        x, y = a.float() * cos - b.float() * sin, b.float() * cos + a.float() * sin
        a.copy_(x)
        b.copy_(y)


_KERNELS = {
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": _silu_and_mul,
    "rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()": _rms_norm,
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()":
        _fused_add_rms_norm,
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
    "Tensor cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()": _rotary,
}  # fmt: skip


def install() -> None:
    """Registers them, once."""
    if _LIBRARIES or hasattr(torch.ops._C, _ASKED[0]):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARIES.append(library)
    for name in _ASKED:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    for schema, kernel in _KERNELS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], kernel, "CompositeExplicitAutograd")


install()
