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

from kvpatch.core import seams
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.ledger import Patch, Site, Wrapper
from kvpatch.core.releases import ReleaseFacts

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


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    if facts.registers_shared_tensors_once:
        return {}
    return {seams.register_kv_caches(facts): _register_kv_caches}


PATCH = Patch(
    slug="shared_tensors",
    wire_affecting=True,
    sites=_sites,
    not_needed="since 0.10.2 a shared tensor is registered once",
    document=__doc__,
)
