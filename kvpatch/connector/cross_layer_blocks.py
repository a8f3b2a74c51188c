"""Registers blocks that are rows of all layers (kvcached's contiguous layout).

The release cannot register them: it computes addresses from the page of a layer. It is
shown tensors of the layout that it knows, over the same memory, which nobody reads or
writes through; NIXL is handed the allocation once; peers are told of rows, and every read
goes through the reader, which knows where things really lie.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import ref

import wrapt

from kvpatch.connector.handshake.block_shapes import tokens_of
from kvpatch.connector.handshake.cross_layer_form import (
    CrossLayerForm,
    packed_digest,
    places_digest,
)
from kvpatch.connector.local.kv_cache_groups import packed_groups
from kvpatch.connector.local.recurrent_state import StateInPool, states_digest, states_in
from kvpatch.connector.local.registered_caches import (
    LayerCache,
    are_unlike,
    have_unlike_pages,
    page_bytes_of,
    read_layers,
)
from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry import (
    CrossLayerBlocks,
    DimensionOrder,
    InnerLayout,
    UnreadableGeometry,
    layer_axes,
    layer_by_layer,
    places_of,
    read_cross_layer_blocks,
    read_packed_groups,
    shares_place,
)

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("kvpatch.registration")


@dataclass(frozen=True)
class RegisteredCrossLayerBlocks:
    """What a worker has registered in place of its tensors.

    Attributes:
        row: where the rows really lie.
        form: what peers are told of them.
        shown: the tensors that the release was shown, read.
        states: the layers with recurrent state among the rows.
        ends: of each attention layer's part, in bytes from a row's beginning.
    """

    row: CrossLayerBlocks
    form: CrossLayerForm
    shown: Mapping[str, LayerCache]
    states: Mapping[str, StateInPool]
    ends: Mapping[str, int]

    def end_of(self, layers: Iterable[str]) -> int:
        """How much of a row a group's layers take, from its beginning."""
        return max(self.ends[name] for name in layers)


def register_cross_layer_blocks(
    wrapped: Callable[..., Any],
    release: ReleaseWorker,
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerCache],
) -> tuple[Any, RegisteredCrossLayerBlocks]:
    """Registers tensors whose blocks are rows of all layers.

    Returns:
        What the release returns, and what it has registered.

    Raises:
        RegistrationRefused: they are not such rows throughout, or this worker cannot read
            into rows.
    """
    worker = release.worker
    groups = release.groups(layers)
    places = places_of([group.layers & layers.keys() for group in groups])
    packed = packed_groups(worker, release.facts) if have_unlike_pages(layers) else None
    row = cross_layer_blocks_of({name: kv_caches[name] for name in layers}, layers, places, packed)
    parts = release.planned_kernel_blocks or 1
    states = states_in(kv_caches, layers, row, parts)
    first = layers[row.layers[0]].planes[0]
    axes_only = CrossLayerForm(first.counts.block_tokens, 1, row.axes)
    shown: dict[str, Any] = shown_tensors(
        release,
        kv_caches,
        layers,
        row,
        axes_only.inner_layout,
        blocks_outermost=bool(states),
    )
    for name, state in states.items():
        of_layer = _shown_state(state, row, parts)
        shown[name] = of_layer if isinstance(kv_caches[name], list | tuple) else of_layer[0]
    # Regions are numbered as layers come: as a plain cache of this model has them.
    shown = {name: shown[name] for name in kv_caches}
    if "head" in row.axes:
        _state_layout(release, axes_only.inner_layout)
    told = places_digest(places) if packed is None else packed_digest(packed)
    # The thread that answers handshakes never ends, and is not to keep the worker.
    this_worker, facts = ref(worker), release.facts

    def restate(metadata: Any) -> Any:
        asked = ReleaseWorker(this_worker(), facts)
        return restated(metadata, row, _form_of(asked, row, layers, told, states))

    agent = _OneRegion(worker.nixl_wrapper, row)
    with release.speaking_through(agent), _listener_told(release, restate):
        result = wrapped(shown)
    form = _form_of(release, row, layers, told, states)
    _restate_payload(release, row, form)
    read = read_layers(release, shown, first_head=first.first_head)
    _LOG.info(
        "%d blocks of all %d layers are registered as rows of %d bytes",
        row.blocks,
        len(layers),
        row.block_bytes,
    )
    return result, RegisteredCrossLayerBlocks(row, form, read, states, _ends(row, layers))


def cross_layer_blocks_of(
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerCache],
    places: Sequence[Sequence[str]],
    packed: Sequence[Sequence[str]] | None = None,
) -> CrossLayerBlocks:
    """The rows that all of a worker's attention tensors are.

    Args:
        places: the layers that are to have one place in a row, by place.
        packed: each group's layers as they are to follow one another, where every group
            divides a row in its own way; None where the places are one for all.

    Raises:
        RegistrationRefused: some are not, with the setting that helps.
    """
    pools = {cache.untyped_storage().data_ptr() for cache in kv_caches.values()}
    if len(pools) > 1:
        raise RegistrationRefused(
            f"the blocks of {len(kv_caches)} layers hold keys and values side by side, or others' "
            f"between them, and lie in {len(pools)} allocations: expected kvcached's contiguous "
            "layout, which has one pool of all layers: set KVCACHED_CONTIGUOUS_LAYOUT=true"
        )
    try:
        if packed is not None and all(layers.keys() >= set(group) for group in packed):
            return read_packed_groups([{n: layers[n].planes for n in group} for group in packed])
        for first, *others in places:
            axes = layer_axes(layers[first].planes)
            for other in others:
                if not shares_place(layers[first].planes, layers[other].planes, axes):
                    raise RegistrationRefused(
                        f"{first} and {other}, of two attention groups, are expected to have one "
                        "place in kvcached's contiguous layout, as many bytes there and one layout "
                        f"inside, and have {layers[first].planes[0]} and "
                        f"{layers[other].planes[0]}: set KVCACHED_CONTIGUOUS_LAYOUT=false"
                    )
        row = read_cross_layer_blocks({first: layers[first].planes for first, *_ in places})
    except UnreadableGeometry as error:
        raise RegistrationRefused(
            f"kvcached's contiguous layout cannot be read here: {error}; set "
            "KVCACHED_CONTIGUOUS_LAYOUT=false"
        ) from error
    if are_unlike(layers) and len(set(row.layer_bytes)) > 1:
        raise RegistrationRefused(
            "layers of several shapes have unlike bytes in a block of kvcached's contiguous "
            f"layout: {sorted(set(row.layer_bytes))}; set KVCACHED_CONTIGUOUS_LAYOUT=false"
        )
    return row


def _ends(row: CrossLayerBlocks, layers: Mapping[str, LayerCache]) -> dict[str, int]:
    return {
        name: layer.planes[0].address - row.address + page_bytes_of(layer)
        for name, layer in layers.items()
    }


# --- what the release is shown ---------------------------------------------------


def shown_tensors(
    release: ReleaseWorker,
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerCache],
    row: CrossLayerBlocks,
    inner_layout: str,
    *,
    blocks_outermost: bool = False,
) -> dict[str, torch.Tensor]:
    """The pool's memory as tensors of the release's own shape, a place behind the other.

    Each has a storage of its own, as kvcached's other layouts have. Layers that begin at one
    place of a row do so here too.

    Args:
        blocks_outermost: whether a block's keys and values are together whatever the shape,
            as releases have them beside recurrent state.
    """
    starts = {
        name: row.address + (layer.planes[0].address - row.address) * row.blocks
        for name, layer in layers.items()
    }
    return {
        name: _shown_tensor(
            kv_caches[name],
            layers[name],
            starts[name],
            release.orders(name)[0],
            inner_layout,
            blocks_outermost=blocks_outermost,
        )
        for name in layers
    }


def _shown_state(state: StateInPool, row: CrossLayerBlocks, parts: int) -> list[torch.Tensor]:
    """A layer's state over the memory of its place, as :func:`shown_tensors` shows it."""
    page_bytes, blocks = row.layer_bytes[0] * parts, row.blocks // parts
    start = row.address + state.place * page_bytes * blocks
    found = []
    for tensor, offset in zip(state.tensors, state.offsets, strict=True):
        item = tensor.element_size()
        flat = _at(tensor, start, page_bytes * blocks // item)
        strides = (page_bytes // item, *tensor.stride()[1:])
        found.append(flat.as_strided(tensor.shape, strides, offset // item))
    return found


def _shown_tensor(
    cache: torch.Tensor,
    layer: LayerCache,
    address: int,
    order: DimensionOrder,
    inner_layout: str,
    *,
    blocks_outermost: bool,
) -> torch.Tensor:
    counts = layer.planes[0].counts
    sizes = {
        "block": counts.blocks,
        "kv": 2,
        "token": counts.block_tokens,
        "head": counts.heads,
        "channel": counts.channels,
        "packed": 2 * counts.channels,
    }
    names = order.dimensions
    if not set(names) <= set(sizes) or order.key_channels is not None:
        raise RegistrationRefused(
            f"this backend's tensors are {names}, which kvcached's contiguous layout does not "
            "stand for: set KVCACHED_CONTIGUOUS_LAYOUT=false"
        )
    # In memory: what is outside a block, then heads and tokens by the layout, then the rest.
    middle = ("token", "head") if inner_layout == "NHD" else ("head", "token")
    fast = [name for name in ("channel", "packed") if name in names]
    slow = [name for name in names if name not in (*middle, *fast)]
    if blocks_outermost:
        slow.sort(key="block".__ne__)
    memory = (*slow, *(name for name in middle if name in names), *fast)
    dense = _at(cache, address, prod(sizes[name] for name in memory))
    return dense.view([sizes[name] for name in memory]).permute(
        [memory.index(name) for name in names]
    )


def _at(like: torch.Tensor, address: int, elements: int) -> torch.Tensor:
    """A flat tensor over memory at an address, of the type and device of another's."""
    import torch

    size_bytes = elements * like.element_size()
    if like.device.type == "cpu":
        raw = torch.frombuffer(
            (ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8
        )
    else:
        raw = torch.as_tensor(_DeviceBytes(address, size_bytes), device=like.device)
    return raw.view(like.dtype)


class _DeviceBytes:
    """Device memory in the form in which torch takes it from others without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _state_layout(release: ReleaseWorker, inner_layout: InnerLayout) -> None:
    """The worker believes in the layout of what it is shown."""
    stated = release.stated_layout
    if stated is not None:
        release.worker.kv_cache_layout = layer_by_layer(inner_layout, like=stated)


class _OneRegion(wrapt.ObjectProxy[Any]):
    """A NIXL agent that registers the rows whatever regions the release names."""

    def __init__(self, agent: Any, row: CrossLayerBlocks) -> None:
        super().__init__(agent)
        self._self_row = row
        self._self_is_named = False

    def get_reg_descs(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """As NIXL's own, for one region.

        Raises:
            RegistrationRefused: the release registers in more than one go.
        """
        if self._self_is_named or not isinstance(descs, list) or not descs:
            raise RegistrationRefused(
                "this vLLM registers memory in a way that kvcached's contiguous layout is not "
                "known to fit: set KVCACHED_CONTIGUOUS_LAYOUT=false"
            )
        self._self_is_named = True
        row = self._self_row
        whole = [(row.address, row.size_bytes, *descs[0][2:])]
        return self.__wrapped__.get_reg_descs(whole, *args, **kwargs)


# --- what peers are told ---------------------------------------------------------


def restated(metadata: Any, row: CrossLayerBlocks, form: CrossLayerForm) -> Any:
    """A copy of a worker's agent metadata that describes its rows.

    No release takes it for its own layout: those <= 0.12 compare the backend's name, those
    from 0.11.1 on the layout's, and all the length of a block where there are no heads.
    """
    found = copy.copy(metadata)
    stated: dict[str, Any] = {
        "kv_caches_base_addr": [row.address],
        "num_blocks": row.blocks,
        "block_len": row.block_bytes,  # <= 0.10.2
        "block_lens": [row.block_bytes],
        "block_strides": [row.block_bytes],  # from 0.29
        "kv_cache_layout": str(form),
        "attn_backend_name": f"{getattr(metadata, 'attn_backend_name', '')} {form}",
        "region_num_blocks": [row.blocks],  # this and all below from 0.30
        "region_group_ids": (getattr(metadata, "region_group_ids", None) or [])[:1],
        "region_names": [row.layers[0]],
        "region_mem_types": (getattr(metadata, "region_mem_types", None) or [])[:1],
        "region_members": [],
        "packed_member_layouts": {},
    }
    for name, value in stated.items():
        if getattr(metadata, name, None) is not None:
            setattr(found, name, value)
    return found


def _form_of(
    release: ReleaseWorker,
    row: CrossLayerBlocks,
    layers: Mapping[str, LayerCache],
    places: str,
    states: Mapping[str, StateInPool],
) -> CrossLayerForm:
    """Asked once the worker knows its kernel blocks; <= 0.17 it finds out as it registers."""
    tokens = min(tokens_of(layers, layers))
    specs = {name: release.spec_of(name) for name in states}
    held = {name: state.place for name, state in states.items()}
    digest = states_digest(places, held, specs)
    return CrossLayerForm(tokens, release.kernel_blocks_per_block, row.axes, digest)


@contextmanager
def _listener_told(release: ReleaseWorker, restate: Callable[[Any], Any]) -> Iterator[None]:
    """In releases <= 0.11.0 a worker starts to answer handshakes while it registers."""
    if release.facts.listens_in_scheduler:
        yield
        return
    worker = release.worker
    listen = worker._nixl_handshake_listener

    def listener(metadata: Any, *more: Any, **named: Any) -> Any:
        return listen(restate(metadata), *more, **named)

    worker._nixl_handshake_listener = listener
    try:
        yield
    finally:
        del worker._nixl_handshake_listener


def _restate_payload(release: ReleaseWorker, row: CrossLayerBlocks, form: CrossLayerForm) -> None:
    """From 0.11.1 a worker's metadata waits to be fetched."""
    worker, facts = release.worker, release.facts
    if not facts.listens_in_scheduler:
        return
    payload = worker.xfer_handshake_metadata
    if not facts.encodes_metadata:
        worker.xfer_handshake_metadata = restated(payload, row, form)
        return
    import msgspec

    kind = vars(sys.modules[type(payload).__module__])["NixlAgentMetadata"]
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=kind)
    told = copy.copy(payload)
    told.agent_metadata_bytes = msgspec.msgpack.encode(restated(metadata, row, form))
    worker.xfer_handshake_metadata = told
