"""Layers that share a tensor are registered once.

Why:
    The hybrid allocator lets layers of different groups share a tensor. Old
    releases register each layer's: 34 layers over 5 tensors become 34
    registrations of memory that NIXL already has, and a peer is told of 68
    regions where there are 10.
Where:
    The worker, on P and on D.
How:
    Only the first layer of every tensor is handed to the registration.
Upstream:
    vLLM #23079, merged for 0.10.2.
Remove when:
    0.10.1.1 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvpatch._versions import GENERATIONS
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.ledger import Patch
from kvpatch.patches import _sites

if TYPE_CHECKING:
    import torch


def _register_kv_caches(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def register(kv_caches: Mapping[str, torch.Tensor]) -> Any:
        owners = first_layers(kv_caches)
        if len(owners) < len(kv_caches) and instance.model_config.hf_config.model_type == "llama4":
            raise RegistrationRefused(
                f"{len(kv_caches)} layers share {len(owners)} tensors, and this release keeps a "
                "window per layer for llama4's local attention: disable the hybrid KV cache "
                "manager (--disable-hybrid-kv-cache-manager)"
            )
        return wrapped(owners)

    return register(*args, **kwargs)


def first_layers(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first layer of every tensor, in the order of registration."""
    owners: dict[int, str] = {}
    for layer, cache in kv_caches.items():
        owners.setdefault(cache.data_ptr(), layer)
    return {layer: kv_caches[layer] for layer in owners.values()}


_NEED_IT = ("g0100", "g0101")

PATCH = Patch(
    slug="shared_tensors",
    wire_affecting=True,
    sites={
        g.slug: {_sites.register_kv_caches(g): _register_kv_caches}
        for g in GENERATIONS
        if g.slug in _NEED_IT
    },
    not_needed={
        g.slug: "since 0.10.2 a shared tensor is registered once"
        for g in GENERATIONS
        if g.slug not in _NEED_IT
    },
    document=__doc__,
)
