"""Recurrent state in rows of all layers, as vLLM itself lays it out (0.29 on, BLNHC and BLHNC).

The release steps from block to block of a state by its own page, where a row of all layers
lies between the two: it sends other layers' bytes, without an error. Only where attention of
another group begins in the same place, and is registered first, does it step as it should.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.geometry import LAYERS_INSIDE_BLOCKS, in_order


def misread_states(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], attention: Collection[str]
) -> bool:
    """Whether the release would look elsewhere for the state of a layer.

    Args:
        attention: the layers that are no state.
    """
    if release.stated_layout not in LAYERS_INSIDE_BLOCKS:
        return False
    if release.worker._is_csa_linear:  # a kind of its own, by its strides
        return False
    specs = release.worker._layer_specs
    return any(
        _is_misread(name, kv_caches, attention, int(specs[name].page_size_bytes))
        for name in kv_caches.keys() - frozenset(attention)
        if type(specs.get(name)).__name__ == "MambaSpec"
    )


def _is_misread(
    name: str, kv_caches: Mapping[str, Any], attention: Collection[str], page_bytes: int
) -> bool:
    cache = kv_caches[name]
    if cache.stride(0) * cache.element_size() == page_bytes:
        return False
    return not all(
        first in attention and kv_caches[first][0].is_contiguous()
        for first in (
            next(other for other in order if kv_caches[other].data_ptr() == cache.data_ptr())
            for order in (kv_caches, in_order(kv_caches))  # 0.29's, and later ones'
        )
    )
