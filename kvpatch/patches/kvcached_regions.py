"""Keys and values that lie far apart are registered as regions of their own.

Why:
    kvcached lays a layer out split-half: the keys of all blocks, then, far away,
    the values of all blocks. Where the backend's shape is ``[blocks, 2, ...]``,
    stock takes keys and values to be neighbours inside a block: for 16 tokens,
    8 heads and 128 channels it steps 32768 elements a block where the tensor
    steps 16384, sends keys where values belong, and never sends a value.
Where:
    The worker, on P and on D.
How:
    Such tensors are handed to the registration with keys first, and the worker
    is told that its keys and values are apart; from 0.26 on, which knows one
    region a layer, each half is registered as a layer. A peer that does not do
    the same has another number of regions or another block length and refuses
    the handshake. Tensors whose blocks hold other layers too (kvcached's
    contiguous layout) are refused until they are supported.
Upstream:
    kvcached #313 and #391.
Remove when:
    The connector registers every tensor by its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from kvpatch import _env
from kvpatch._errors import RegistrationRefused
from kvpatch._patching import Patch
from kvpatch._versions import GENERATIONS
from kvpatch.geometry import Plane
from kvpatch.patches import _sites
from kvpatch.vllm.caches import LayerCache, read_layers
from kvpatch.vllm.our_side import call_layout_by_its_strides
from kvpatch.vllm.registration import REGISTRATIONS, Registration

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
        if _env.is_kvcached_enabled():
            refuse_interleaved(layers)
        apart = {layer for layer, cache in layers.items() if is_split_inside(cache)}
        if not apart:
            return wrapped(kv_caches)
        if apart != kv_caches.keys():
            raise RegistrationRefused(
                f"{', '.join(sorted(apart))} keep keys and values apart and "
                f"{', '.join(sorted(kv_caches.keys() - apart))} do not: one worker can register "
                "one or the other; set ENABLE_KVCACHED=false for this model"
            )
        call_layout_by_its_strides(instance, layers)
        return wrapped(registration.show_split(instance, kv_caches))

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


def refuse_interleaved(layers: Mapping[str, LayerCache]) -> None:
    """Refuses kvcached's contiguous layout.

    Raises:
        RegistrationRefused: with the layer's strides and the setting that helps.
    """
    for layer, cache in layers.items():
        if arrangement(cache.planes) == "interleaved":
            plane = cache.planes[0]
            raise RegistrationRefused(
                f"layer {layer}: blocks lie {plane.strides_bytes.block} bytes apart and hold "
                f"{block_content_bytes(plane)} bytes of {plane.content.value} each, so that other "
                "layers' blocks lie between them (kvcached's contiguous layout), which cannot be "
                "registered yet: set KVCACHED_CONTIGUOUS_LAYOUT=false"
            )


PATCH = Patch(
    slug="kvcached_regions",
    wire_affecting=True,
    sites={
        g.slug: {
            _sites.register_kv_caches(g): partial(
                _register_kv_caches, registration=REGISTRATIONS[g.slug]
            )
        }
        for g in GENERATIONS
    },
    not_needed={},
    document=__doc__,
)
