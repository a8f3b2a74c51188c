"""Tensors over kvcached's memory are registered as they lie: halves apart, or rows.

Why:
    kvcached lays a layer out split-half: the keys of all blocks, then, far away,
    the values of all blocks. Where the backend's shape is ``[blocks, 2, ...]``,
    stock takes keys and values to be neighbours inside a block: for 16 tokens,
    8 heads and 128 channels it steps 32768 elements a block where the tensor
    steps 16384, sends keys where values belong, and never sends a value. Its default,
    contiguous layout has the layers of a block side by side in one pool,
    ``[blocks, layers, 2, 16, 8, 128]``: stock computes addresses from one layer's page
    and moves other layers' bytes, to 0.23 and in part later without an error.
Where:
    The worker, on P and on D.
How:
    Such tensors are handed to the registration with keys first, and the worker
    is told that its keys and values are apart; from 0.26 on, which knows one
    region a layer, each half is registered as a layer. A peer that does not do
    the same has another number of regions or another block length and refuses
    the handshake; ``unlike_engines`` reads across. Of the contiguous layout NIXL is
    handed the pool once, and peers are told of rows of all layers, which a peer
    without kvpatch refuses; reads go through ``unlike_engines``, between two such
    pools one descriptor a block. vLLM's own pools of hybrid models go the same way in
    layouts BLNHC and BLHNC (0.29 on), whose states the release reads from other places.
    Tensors of any other allocator, or of kvcached without its variable in this process, are
    looked at by their strides: where the release takes blocks to lie elsewhere they are
    refused, and where heads and tokens have another order than the backend's peers are told.
    Tensors that contradict kvcached's variables, or one another, are refused, and so is
    a device's memory that a network card could register: it would keep the pages that
    are mapped then.
Upstream:
    kvcached #313 and #391.
Remove when:
    The connector registers every tensor by its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from kvpatch.core import seams, settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.ledger import Patch, Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import DimensionOrder, Plane
from kvpatch.vllm.backend_layouts import state_own_order
from kvpatch.vllm.caches import LayerCache, read_layers
from kvpatch.vllm.cross_layer_blocks import register_rows
from kvpatch.vllm.kvcached_cards import refuse_cards
from kvpatch.vllm.kvcached_pages import pages_behind
from kvpatch.vllm.kvcached_pools import check_pools, kvcacheds_settings
from kvpatch.vllm.local_geometry import call_layout_by_its_strides
from kvpatch.vllm.misread_states import misread_states
from kvpatch.vllm.registered_strides import strides_checked
from kvpatch.vllm.registration import Registration, registration_of
from kvpatch.vllm.state import worker_state
from kvpatch.vllm.transport_notes import note_transport

#: How the blocks of one layer lie: keys and values inside a block, in a region
#: each, or with other layers' between them.
Arrangement = Literal["together", "apart", "interleaved"]


def _register_kv_caches(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    registration: Registration,
) -> Any:
    def register(kv_caches: Mapping[str, Any]) -> Any:
        layers = read_layers(registration, instance, kv_caches)
        state = worker_state(instance)
        state.rows = state.planned_layout = None  # of an earlier registration
        if settings.is_kvcached_enabled():
            if (
                not state.is_host_buffered
            ):  # what a host buffer copies was looked at as that was made
                refuse_cards(instance, kv_caches)
                note_transport(kv_caches)
                check_pools(kv_caches, layers, kvcacheds_settings())
                state.pages = pages_behind(kv_caches, layers)
            expected = {layer: registration.orders(instance, layer)[0] for layer in layers}
            if is_in_rows(layers, expected, has_state=len(layers) < len(kv_caches)):
                refuse_without_reader(instance)
                result, state.rows = register_rows(
                    wrapped, registration, instance, kv_caches, layers
                )
                return result
            # Its tensors are what they are, whatever VLLM_KV_CACHE_LAYOUT asks for.
            call_layout_by_its_strides(instance, layers)
        elif misread_states(instance, kv_caches, layers):
            try:
                refuse_without_reader(instance)
                result, state.rows = register_rows(
                    wrapped, registration, instance, kv_caches, layers
                )
            except RegistrationRefused as error:
                raise RegistrationRefused(
                    "recurrent state in blocks of all layers, which this vLLM reads from other "
                    "places than it lies in: set VLLM_KV_CACHE_LAYOUT=LBHNC. It cannot be read as "
                    f"kvcached's contiguous layout is either: {error}"
                ) from error
            return result
        elif not state.is_host_buffered and not getattr(instance, "use_host_buffer", False):
            state.planned_layout = state_own_order(instance, layers)
        apart = {layer for layer, cache in layers.items() if is_split_inside(cache)}
        if apart and apart != kv_caches.keys():
            raise RegistrationRefused(
                f"{', '.join(sorted(apart))} keep keys and values apart and "
                f"{', '.join(sorted(kv_caches.keys() - apart))} do not: one worker can register "
                "one or the other; set ENABLE_KVCACHED=false for this model"
            )
        shown = kv_caches
        if apart:
            call_layout_by_its_strides(instance, layers)
            shown = registration.show_split(instance, kv_caches)
        with strides_checked(instance, layers):
            return wrapped(shown)

    return register(*args, **kwargs)


def arrangement(planes: tuple[Plane, ...]) -> Arrangement:
    """How one layer's blocks lie, from the distance between them."""
    block_bytes = block_content_bytes(planes[0])
    stride_bytes = planes[0].strides_bytes.block
    if stride_bytes == block_bytes * len(planes):
        return "together"
    if stride_bytes == block_bytes:
        return "apart"
    return "interleaved"


def block_content_bytes(plane: Plane) -> int:
    """Bytes of one content in one block, without what may lie between them."""
    counts = plane.counts
    return counts.heads * counts.block_tokens * counts.channels * plane.item_bytes


def is_split_inside(cache: LayerCache) -> bool:
    """Whether keys and values are apart where the shape says that a block holds both.

    A keys-first tensor is two regions to every release that has such tensors.
    """
    blocks_first = cache.order.dimensions[:2] == ("block", "kv")
    return blocks_first and arrangement(cache.planes) == "apart"


def is_in_rows(
    layers: Mapping[str, LayerCache],
    expected: Mapping[str, DimensionOrder],
    *,
    has_state: bool = False,
) -> bool:
    """Whether any layer's blocks have other layers' between them.

    A single layer's have not, and are rows all the same where this release has keys and
    values in regions of their own, or packed. Not in hybrid models, in which the release itself
    has them together, so that a block may be a state's.
    """
    for layer, cache in layers.items():
        arranged = arrangement(cache.planes)
        as_expected = expected[layer].dimensions[:2] == ("block", "kv")
        if arranged == "interleaved" or (
            arranged == "together"
            and "kv" in cache.order.dimensions
            and not as_expected
            and not has_state
        ):
            return True
    return False


def refuse_without_reader(worker: Any) -> None:
    """Refuses a worker whose reads the release would do itself, which knows no rows.

    Raises:
        RegistrationRefused: with the setting that helps.
    """
    if "unlike_engines" in settings.disabled_slugs():
        raise RegistrationRefused(
            "kvcached's contiguous layout is read by unlike_engines, which KVPATCH_DISABLE turns "
            "off: leave it on, or set KVCACHED_CONTIGUOUS_LAYOUT=false"
        )
    if not hasattr(worker, "_read_blocks_for_req"):
        raise RegistrationRefused(
            "in push mode P writes to D's memory, and kvcached's contiguous layout can only be "
            "read: use NixlConnector, which pulls, or set KVCACHED_CONTIGUOUS_LAYOUT=false"
        )


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    registration = registration_of(facts)
    return {
        seams.register_kv_caches(facts): partial(_register_kv_caches, registration=registration)
    }


PATCH = Patch(slug="kvcached_regions", wire_affecting=True, sites=_sites, document=__doc__)
