"""KV cache tensors of any geometry, and how their contents are read.

Each tensor is handed to the connector exactly as the release would shape it;
beside it stand views with the axes (block, token, head, channel), one for keys
and one for values (or one latent), which are all that the comparison sees.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .case import EngineSpec
from .compare import UNSIGNED, Array
from .kinds import (
    INDEXER_BYTES,
    amx_planes,
    halves_of_block,
    indexer_planes,
    shuffled_planes,
    slot_planes,
)
from .kvcached_standin import Reservation, allocate, allocate_planned
from .layer_kinds import KINDS, POSITIONS
from .odd_strides import ODD, odd_strides

_TORCH = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.uint8,
}
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Distinct, and products of no others, so that a size tells its dimension.
_PROBE = {"block": 5003, "token": 112, "head": 11, "channel": 96}
# How far kvcached's value half lies behind its key half, as a share of the
# key half: its halves are reserved for more blocks than the cache has.
_HALF_GAP = 1.5
# How kvcached shapes a layer for releases whose own shape is packed.
_KVCACHED_DIMS = ("block", "kv", "token", "head", "channel")
# Of a draft model's layer, from 0.29 on.
_DRAFTS = ("block", "head", "token", "packed")


#: The setting that has kvcached's last layer lie elsewhere: in "other" memory, or in other memory
#: while it "claims" to be in kvcached's.
ODD_LAYER = "LAB_KVCACHED_ODD_LAYER"
#: The setting that has a page under D's blocks not mapped.
UNMAPPED = "LAB_KVCACHED_UNMAPPED"


class UnknownShape(RuntimeError):
    """The release's backend shapes its cache in a way the lab cannot name."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's tensor and its planes, each [block, token, head, channel]."""

    name: str
    tensor: torch.Tensor | list[torch.Tensor]
    planes: tuple[Array, ...]
    #: [block, byte] of a state's pages, of which it need not fill the end.
    pages: Array | None = None


@dataclass(frozen=True)
class Caches:
    """All layers of one rank, and the memory behind them."""

    layers: tuple[LayerCache, ...]
    #: Whole allocations as bytes.
    allocated: tuple[Array, ...]
    #: Allocations of which only some pages are there.
    reservations: tuple[Reservation, ...] = ()
    #: Layers in the order of their registration; empty for that of their numbers.
    registered: tuple[str, ...] = ()
    #: Names of layers that look at the first one's cache.
    sharing: tuple[str, ...] = ()

    @property
    def memory(self) -> tuple[Array, ...]:
        """All memory that is there, as bytes: for noise before, and stray writes after."""
        pages = [r.bytes_at(page) for r in self.reservations for page in sorted(r.mapped)]
        return (*self.allocated, *pages)

    def map_blocks(self, layer: int, blocks: Sequence[int], noise: np.random.Generator) -> None:
        """Puts memory, and noise in it, behind blocks of a layer."""
        spans = [_span(plane[block]) for plane in self.layers[layer].planes for block in blocks]
        for reservation in self.reservations:
            end = reservation.address + reservation.size_bytes
            inside = [s for s in spans if reservation.address <= s[0] < end]
            for page in sorted(reservation.pages_of(inside) - reservation.mapped):
                reservation.map(page)
                found = reservation.bytes_at(page)
                found[:] = noise.integers(0, 256, found.size, dtype=np.uint8)

    def clear(self, layer: int, blocks: Sequence[int]) -> None:
        """Zeroes blocks of a layer, where there is memory behind them."""
        for plane in self.layers[layer].planes:
            for block in blocks:
                span = _span(plane[block])
                if all(self._is_there(reservation, span) for reservation in self.reservations):
                    plane[block] = 0

    @staticmethod
    def _is_there(reservation: Reservation, span: tuple[int, int]) -> bool:
        inside = reservation.address <= span[0] < reservation.address + reservation.size_bytes
        return not inside or set(reservation.pages_of([span])) <= reservation.mapped

    def unmap_one(self) -> None:
        """Takes a page away that is there."""
        reservation = next(r for r in self.reservations if r.mapped)
        reservation.unmap(max(reservation.mapped))

    def tensors(self) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """In the order in which the runner registers them."""
        found = {layer.name: layer.tensor for layer in self.layers}
        registered = {name: found[name] for name in self.registered or found}
        return registered | dict.fromkeys(self.sharing, self.layers[0].tensor)


def _span(array: Array) -> tuple[int, int]:
    """(address, bytes) from the first to past the last element."""
    axes = zip(array.shape, array.strides, strict=True)
    reach = sum((count - 1) * stride for count, stride in axes)
    return array.__array_interface__["data"][0], reach + array.itemsize


def torch_dtype(dtype: str) -> torch.dtype:
    return _TORCH[dtype]


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def probe_dims(backend: type[Any], family: str) -> tuple[str, ...]:
    """What each dimension of a layer's cache means in this release."""
    if not hasattr(backend, "get_kv_cache_shape"):
        # From 0.29 on every attention cache is [B, H, N, content].
        last = "channel" if family in ("mla", "b12x", "aiter") else "packed"
        return ("block", "head", "token", last)
    heads = 1 if family == "mla" else _PROBE["head"]
    shape = backend.get_kv_cache_shape(_PROBE["block"], _PROBE["token"], heads, _PROBE["channel"])
    meaning = {size: dim for dim, size in _PROBE.items()}
    meaning |= {2: "kv", 2 * _PROBE["channel"]: "packed"}
    if family == "pallas":  # keys and values by turns; channels in whole registers
        meaning |= {2 * _PROBE["head"]: "packed_head", 128: "channel"}
    if family == "mla":
        meaning[1] = "head"
    try:
        return tuple(meaning[size] for size in shape)
    except KeyError as error:
        raise UnknownShape(f"{backend.__name__}: {shape} for {_PROBE}") from error


def memory_order(
    backend: type[Any], dims: tuple[str, ...], layout: str, allocation: str = "plain"
) -> tuple[str, ...]:
    """`dims` (with "layer" where layers share a buffer) from slow to fast."""
    if allocation == "all_layers":
        axes = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        return tuple(("layer", *dims)[axis] for axis in axes)
    if not hasattr(backend, "get_kv_cache_shape"):
        from vllm.v1.kv_cache_interface import KVCacheLayout

        names = ("layer", *dims)
        return tuple(names[axis] for axis in KVCacheLayout[layout].value)
    try:
        order = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError):
        return ("layer", *dims)
    return ("layer", *(dims[axis] for axis in order))


def build(
    spec: EngineSpec,
    backend: type[Any],
    layout: str,
    slots: Sequence[int],
    state_spec: Any = None,
    plan: Any = None,
    store: Callable[..., torch.Tensor] = torch.zeros,
) -> Caches:
    """Allocates the caches of one rank; contents are noise until written.

    Layers with one number in `slots` share their memory: all of it where they hold
    one content, block by block where they are of several cache groups.

    Args:
        plan: the release's own, by which it lays out caches itself from 0.29 on.
        store: makes flat memory that nobody else lays out.
    """
    dims = probe_dims(backend, spec.family)
    has_plan = not hasattr(backend, "get_kv_cache_shape")
    if spec.allocation in ("kvcached_rows", "kvcached_apart"):
        if has_plan:
            return _planned_by_kvcached(spec, dims, layout, plan)
        return _by_kvcached(spec, dims, layout, slots, state_spec)
    if is_in_rows(plan):
        return _in_rows(spec, dims, plan)
    if has_plan and spec.is_placed:
        return _by_release(spec, dims, layout, plan)
    if spec.mixes_kinds:
        return _each_of_its_own(spec, backend, layout)
    if spec.allocation in ("split_half", "contiguous") and "packed" in dims:
        # kvcached has no halves to keep apart in a packed shape: it adds a dimension.
        dims = _KVCACHED_DIMS
        order: tuple[str, ...] = ("layer", *dims)
    else:
        order = memory_order(backend, dims, layout, spec.allocation)
        if spec.has_state:  # blocks of both kinds have one page: keys and values of it too
            inner = [dim for dim in order if dim not in ("layer", "block", "kv")]
            order = ("layer", "block", *(("kv",) if "kv" in dims else ()), *inner)
    dtype = torch_dtype(spec.dtype)
    # On releases <= 0.28 each layer has an allocation of its own; from 0.29 on all share
    # one, unless they come from kvcached, which is when the counts differ.
    by_kvcached = spec.tensor_blocks is not None or spec.allocation in ("split_half", *ODD)
    own = hasattr(backend, "get_kv_cache_shape") or by_kvcached
    apart = order[0] == "layer" and spec.allocation not in ("contiguous", "pool") and own
    count = max(slots) + 1 if apart else 1
    # Blocks of all layers have one size in bytes, or the last one's have the most.
    largest = spec.layers - 1 if spec.allocation in ODD else spec.attention_layer
    _, length = _strides(spec, dims, order, slots, largest)
    stores = [store(length // count, dtype=dtype) for _ in range(count)]
    layers = []
    for layer in range(spec.layers):
        slot = slots[layer]
        if spec.is_state(layer):
            if not apart:
                raise UnknownShape("state in a buffer of all layers")
            page_bytes = stores[slot].nbytes // (spec.blocks * spec.parts) * spec.parts
            layers.append(_state_layer(spec, layer, stores[slot], page_bytes))
            continue
        sizes = _sizes(spec, layer, slots)
        strides, _ = _strides(spec, dims, order, slots, layer)
        store, offset = (stores[slot], 0) if apart else (stores[0], slot * strides["layer"])
        tensor = torch.as_strided(
            store, [sizes[d] for d in dims], [strides[d] for d in dims], offset
        )
        planes = _planes(tensor, dims, spec, layer)
        layers.append(LayerCache(layer_name(layer), tensor, planes))
    memory = tuple(store.view(torch.uint8).numpy() for store in stores)
    return Caches(tuple(layers), memory)


def all_layers(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The one tensor that layers are views of, its dimensions from slow to fast."""
    first, second = list(tensors.values())[:2]
    step = second.storage_offset() - first.storage_offset()
    axes = sorted(
        [*zip(first.stride(), first.shape, strict=True), (step, len(tensors))], reverse=True
    )
    return first.as_strided([size for _, size in axes], [stride for stride, _ in axes], 0)


def _each_of_its_own(spec: EngineSpec, backend: type[Any], layout: str) -> Caches:
    """On releases <= 0.28 each layer has an allocation of its own, of its own bytes."""
    from .release import backend as of_family

    of_model = backend, spec.family
    layers, memory = [], []
    for layer in range(spec.layers):
        own, family = (of_family("flash"), "flash") if spec.is_draft(layer) else of_model
        dims = probe_dims(own, family)
        order = memory_order(own, dims, layout)[1:]
        sizes, dtype = _sizes(spec, layer, range(spec.layers)), torch_dtype(spec.dtype)
        if spec.is_indexer(layer):
            sizes["channel"], dtype = INDEXER_BYTES, torch.uint8
        is_pooled = spec.kind_of(layer) == "pooled"
        if is_pooled:  # the release's own shape: more tokens, at the cost of heads
            sizes |= {"token": sizes["token"] * POSITIONS, "head": sizes["head"] // POSITIONS}
        store = torch.zeros([sizes[dim] for dim in order], dtype=dtype)
        tensor = store.permute([order.index(dim) for dim in dims])
        memory.append(store.view(torch.uint8).numpy().reshape(-1))
        planes = _planes(tensor, dims, spec, layer)
        if is_pooled:  # those of the same number in all tokens
            planes = tuple(one[:, n::POSITIONS] for one in planes for n in range(POSITIONS))
        layers.append(LayerCache(layer_name(layer), tensor, planes))
    return Caches(tuple(layers), tuple(memory))


def _state_layer(spec: EngineSpec, layer: int, store: torch.Tensor, page_bytes: int) -> LayerCache:
    """As vLLM views a page's states: one behind the other, from its beginning."""
    if not states_apart():
        size, strides = (spec.blocks, 1, 1, page_bytes), (page_bytes, page_bytes, page_bytes, 1)
        return _state_cache(spec, layer, torch.as_strided(store.view(torch.int8), size, strides))
    tensors, offset = [], 0
    for shape in spec.states_of(layer).shapes(spec.tp_size):
        inner = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        outer = page_bytes // store.element_size()
        tensors.append(torch.as_strided(store, (spec.blocks, *shape), (outer, *inner), offset))
        offset += math.prod(shape)
    return _state_cache(spec, layer, tensors)


def states_apart() -> bool:
    """Whether the release's runner hands over a tensor for each state (<= 0.26), or pages."""
    utils = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")
    kinds = [kind for kind in vars(utils).values() if isinstance(kind, type)]
    return any("get_transfer_cache_regions" in vars(kind) for kind in kinds)


def _state_cache(
    spec: EngineSpec, layer: int, tensor: torch.Tensor | list[torch.Tensor]
) -> LayerCache:
    """Each state as [block, token, head, channel] of one token and head."""
    first = tensor[0] if isinstance(tensor, list) else tensor
    raw = first.view(_RAW[first.element_size()]).numpy()
    contents = 1 if spec.family == "mla" else 2
    page_bytes = contents * spec.block_tokens * math.prod(spec.shape_of(0)) * spec.item_bytes
    start = first.data_ptr() - first.untyped_storage().data_ptr()
    pages = rows_of(first, start, raw.strides[0], page_bytes)
    planes, offset = [], 0
    for shape in spec.states_of(layer).shapes(spec.tp_size):
        size = math.prod(shape) * spec.state_item_bytes
        flat = pages[:, offset : offset + size].view(UNSIGNED[spec.state_item_bytes])
        planes.append(flat[:, None, None, :])
        offset += size
    return LayerCache(layer_name(layer), tensor, tuple(planes), pages)


def _sizes(spec: EngineSpec, layer: int, slots: Sequence[int]) -> dict[str, int]:
    heads, channels = spec.shape_of(layer)
    return {
        "block": spec.blocks * spec.parts,
        "token": spec.block_tokens_of(layer) // spec.parts,
        "head": heads,
        "channel": channels,
        "packed": 2 * channels,
        "packed_head": 2 * heads,
        "kv": 2,
        "layer": max(slots) + 1,
    }


def _strides(
    spec: EngineSpec,
    dims: tuple[str, ...],
    order: tuple[str, ...],
    slots: Sequence[int],
    layer: int,
) -> tuple[dict[str, int], int]:
    """Element strides of every dimension, and how many elements all layers take."""
    sizes = _sizes(spec, layer, slots)
    if spec.allocation in ODD:
        return odd_strides(spec.allocation, order, sizes, layer)
    if spec.allocation == "split_half":
        return _split_half(dims, order, sizes)
    if spec.allocation == "contiguous":
        return _contiguous(dims, order, sizes)
    return _dense(order, sizes), math.prod(sizes[d] for d in order)


def _by_kvcached(
    spec: EngineSpec, dims: tuple[str, ...], layout: str, slots: Sequence[int], state_spec: Any
) -> Caches:
    """As kvcached's own code lays the layers out, in shapes that it knows."""
    if spec.family == "mla":
        dims = ("block", "token", "channel")
    is_hnd = layout in ("HND", "LBHNC", "BLHNC") and "packed" in dims

    first = spec.attention_layer
    attention = "HYBRID_LINEAR" if spec.has_state else "MLA" if spec.family == "mla" else "MHA"

    def shape(layer: int) -> list[int]:
        sizes = _sizes(spec, layer, slots) | {
            "block": spec.planned_blocks,
            "token": spec.block_tokens_of(layer),
        }
        return [sizes[d] for d in dims]

    shapes = {
        layer: (tuple(shape(layer)), spec.block_tokens_of(layer))
        for layer in range(spec.layers)
        if not spec.is_state(layer)
    }
    other_shapes = [other for other in dict.fromkeys(shapes.values()) if other != shapes[first]]
    # Layers of several groups share a tensor, as kvcached hands it to both.
    found = allocate(
        shape(first),
        spec.block_tokens_of(first),
        torch_dtype(spec.dtype),
        max(slots) + 1,
        contiguous=spec.allocation == "kvcached_rows",
        attention=attention,
        layout="HND" if is_hnd else "NHD",
        virtual_blocks=spec.blocks,
        other_shapes=other_shapes,
        kernel_block_tokens=spec.block_tokens_of(first) // spec.parts,
        state_spec=state_spec,
        states_apart=not spec.has_state or states_apart(),
    )
    views = {shapes[first]: found.tensors} | dict(zip(other_shapes, found.others, strict=True))
    tensors: list[Any] = [
        found.states[slot] if spec.is_state(layer) else views[shapes[layer]][slot]
        for layer, slot in enumerate(slots)
    ]
    odd = os.environ.get(ODD_LAYER, "")
    if odd:
        mark = tensors[-1]._kvcached_block_copy_view
        tensors[-1] = torch.zeros(tensors[-1].shape, dtype=tensors[-1].dtype)
        if odd == "claims":
            tensors[-1]._kvcached_block_copy_view = mark
    layers = tuple(
        _state_cache(spec, number, tensor)
        if spec.is_state(number)
        else LayerCache(layer_name(number), tensor, _planes(tensor, dims, spec, number))
        for number, tensor in enumerate(tensors)
    )
    return Caches(layers, (), tuple(found.reservations))


def _planned_by_kvcached(spec: EngineSpec, dims: tuple[str, ...], layout: str, plan: Any) -> Caches:
    """As kvcached has the release lay out its plan, from 0.29 on."""
    found = allocate_planned(
        plan,
        layout,
        _kernel_block_tokens(spec, plan),
        contiguous=spec.allocation == "kvcached_rows",
        virtual_blocks=spec.blocks,
    )
    tensors = dict(found.tensors)
    if os.environ.get(ODD_LAYER):
        last = tensors[layer_name(spec.layers - 1)]
        tensors[layer_name(spec.layers - 1)] = torch.zeros(last.shape, dtype=last.dtype)
    layers = _named_layers(spec, dims, tensors)
    return Caches(layers, (), found.reservations, tuple(tensors))


def _by_release(spec: EngineSpec, dims: tuple[str, ...], layout: str, plan: Any) -> Caches:
    """As the release itself lays out its plan, from 0.29 on."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    utils = importlib.import_module("vllm.v1.worker.utils")
    tensors = utils.allocate_kv_cache(
        plan, torch.device("cpu"), KVCacheLayout[layout], _kernel_block_tokens(spec, plan)
    )
    whole = next(iter(tensors.values())).untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(whole)
    layers = _named_layers(spec, dims, tensors)
    if spec.packs_pages:  # a block's row is its group's, whose layers may leave some of it over
        rows = memory.numpy().reshape(plan.num_blocks, -1)
        layers = tuple(replace(layer, pages=rows) for layer in layers)
    return Caches(layers, (memory.numpy(),), registered=tuple(tensors))


def is_in_rows(plan: Any) -> bool:
    """Whether a block is a row of all layers, as DeepSeek-V4's are on 0.24 to 0.28."""
    first = None if plan is None else plan.kv_cache_tensors[0]
    return hasattr(first, "shared_by") and getattr(first, "block_stride", 0) > 0


def _in_rows(spec: EngineSpec, dims: tuple[str, ...], plan: Any) -> Caches:
    """As the release's runner lays out such a plan: each layer's page has its place in a row."""
    memory = torch.zeros(plan.kv_cache_tensors[0].size, dtype=torch.uint8)
    rows = memory.view(plan.num_blocks, plan.kv_cache_tensors[0].block_stride)
    starts = {name: part.offset for part in plan.kv_cache_tensors for name in part.shared_by}
    tensors = {}
    for number in range(spec.layers):
        name, backend = layer_name(number), KINDS[spec.kind_of(number)].backend()
        (of_layer,) = (
            group.kv_cache_spec.kv_cache_specs[name]
            for group in plan.kv_cache_groups
            if name in group.layer_names
        )
        shape = backend.get_kv_cache_shape(
            *(plan.num_blocks, of_layer.storage_block_size, 1, of_layer.head_size),
            cache_dtype_str=of_layer.cache_dtype_str or "auto",
        )
        page_bytes = math.prod(shape[1:]) * of_layer.dtype.itemsize
        page = rows[:, starts[name] : starts[name] + page_bytes]
        tensors[name] = page.view(of_layer.dtype).view(shape)
    return Caches(_named_layers(spec, dims, tensors), (memory.numpy(),))


def _pages(tensor: torch.Tensor) -> Array:
    """[block, byte] of all that a whole block has, or shares with layers beside it."""
    stride = tensor.stride(0) * tensor.element_size()
    start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    has_rows = stride * tensor.shape[0] == tensor.untyped_storage().nbytes()
    return rows_of(tensor, start - start % stride if has_rows else start, stride, stride)


def rows_of(tensor: torch.Tensor, start: int, stride: int, width: int) -> Array:
    """[block, byte] of `width` bytes each, `stride` apart, from a place in a tensor's storage on.

    What is checked is written to by way of them: past the end it would be another's memory.
    """
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    blocks = tensor.shape[0]
    end = start + (blocks - 1) * stride + width
    if start < 0 or width > stride or end > whole.size:
        raise UnknownShape(
            f"{blocks} rows of {width} bytes, {stride} apart, in bytes {start} to {end} of "
            f"{whole.size}"
        )
    return np.lib.stride_tricks.as_strided(whole[start:], (blocks, width), (stride, 1))


def _kernel_block_tokens(spec: EngineSpec, plan: Any) -> list[int]:
    """Of each cache group; a state is never cut."""
    found = []
    for group in plan.kv_cache_groups:
        tokens = group.kv_cache_spec.block_size
        is_state = any(
            spec.is_state(number)
            for number in range(spec.layers)
            if layer_name(number) in group.layer_names
        )
        found.append(tokens if is_state else tokens // spec.parts)
    return found


def _named_layers(
    spec: EngineSpec, dims: tuple[str, ...], tensors: Mapping[str, torch.Tensor]
) -> tuple[LayerCache, ...]:
    """By their numbers."""
    found = []
    for number in range(spec.layers):
        name = layer_name(number)
        kind = spec.kind_of(number)
        if spec.is_state(number):
            states = _state_cache(spec, number, tensors[name])
            # Beside layers of other kinds its block's row is its group's.
            found.append(replace(states, pages=_pages(tensors[name])) if kind else states)
        elif kind:
            found_by_head = tensors[name] if tensors[name].dim() == 4 else tensors[name][:, None]
            planes = KINDS[kind].planes(found_by_head, spec)
            found.append(LayerCache(name, tensors[name], planes, _pages(tensors[name])))
        else:
            own = _DRAFTS if spec.is_draft(number) else dims
            planes = _planes(tensors[name], own, spec, number)
            found.append(LayerCache(name, tensors[name], planes))
    return tuple(found)


def _dense(order: tuple[str, ...], sizes: dict[str, int]) -> dict[str, int]:
    """Element strides of `order` without gaps."""
    strides, step = {}, 1
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
    return strides


def _split_half(
    dims: tuple[str, ...], order: tuple[str, ...], sizes: dict[str, int]
) -> tuple[dict[str, int], int]:
    """kvcached: all keys of a layer in one region, its values far behind."""
    if "kv" not in dims:
        raise UnknownShape(f"split halves need a K/V dimension, the release has {dims}")
    inner = ("block", *(d for d in order if d not in ("layer", "kv", "block")))
    strides = _dense(inner, sizes)
    half = int(strides["block"] * sizes["block"] * _HALF_GAP)
    strides["kv"] = half
    strides["layer"] = 2 * half
    return strides, 2 * half * sizes["layer"]


def _contiguous(
    dims: tuple[str, ...], order: tuple[str, ...], sizes: dict[str, int]
) -> tuple[dict[str, int], int]:
    """kvcached: the layers of one block side by side."""
    inner = tuple(d for d in order if d not in ("layer", "block", "kv"))
    kv = ("kv",) if "kv" in dims else ()
    whole = ("block", "layer", *kv, *inner)
    return _dense(whole, sizes), math.prod(sizes[d] for d in whole)


def _planes(
    tensor: torch.Tensor, dims: tuple[str, ...], spec: EngineSpec, layer: int
) -> tuple[Array, ...]:
    if spec.is_indexer(layer):
        return indexer_planes(tensor)
    heads, channels = spec.shape_of(layer)
    raw = tensor.view(_RAW[spec.item_bytes]).numpy().view(UNSIGNED[spec.item_bytes])
    if spec.has_slots:
        keys, values = halves_of_block(raw, dims)
        return (shuffled_planes if spec.shuffles else slot_planes)(keys, values, heads, channels)
    if spec.family == "cpu":
        return _cpu_planes(raw, dims, spec)
    if "packed" in dims:
        halves = [raw[..., :channels], raw[..., channels:]]
        axes = tuple("channel" if d == "packed" else d for d in dims)
    elif "packed_head" in dims:
        halves = [raw[:, :, k::2] for k in (0, 1)]
        axes = tuple("head" if d == "packed_head" else d for d in dims)
    elif "kv" in dims:
        halves = [raw[_pick(dims, k)] for k in (0, 1)]
        axes = tuple(d for d in dims if d != "kv")
    else:
        halves, axes = [raw], dims
    return tuple(_as_bthc(half, axes) for half in halves)


def _pick(dims: tuple[str, ...], kv: int) -> tuple[Any, ...]:
    return tuple(kv if d == "kv" else slice(None) for d in dims)


def _as_bthc(array: Array, axes: tuple[str, ...]) -> Array:
    if "head" not in axes:
        array, axes = array[..., None], (*axes, "head")
    return array.transpose([axes.index(d) for d in ("block", "token", "head", "channel")])


def _cpu_planes(raw: Array, dims: tuple[str, ...], spec: EngineSpec) -> tuple[Any, ...]:
    """The CPU backend: inside a block and head, keys as [channel, token], or all in tiles."""
    tokens, channels = spec.block_tokens // spec.parts, spec.head_dim
    if dims[-3:] == ("head", "token", "packed"):
        flat = _merge_last_two(raw)
        keys, values = flat[..., : tokens * channels], flat[..., tokens * channels :]
    elif dims[-3:] == ("head", "token", "channel"):
        keys, values = (_merge_last_two(raw[_pick(dims, k)]) for k in (0, 1))
    else:
        raise UnknownShape(f"the CPU backend's cache as {dims}")
    if spec.is_tiled:
        return amx_planes(keys, values, tokens, channels)
    blocks, heads = keys.shape[:2]
    keys = _split_last(keys, (channels, tokens)).transpose(0, 3, 1, 2)
    values = _split_last(values, (tokens, channels)).transpose(0, 2, 1, 3)
    assert keys.shape == values.shape == (blocks, tokens, heads, channels)
    return keys, values


def _merge_last_two(array: Array) -> Array:
    """A view, never a copy: the last two axes must be dense."""
    *lead, rows, columns = array.shape
    if array.strides[-2] != columns * array.itemsize or array.strides[-1] != array.itemsize:
        raise UnknownShape(f"rows of {array.shape} with strides {array.strides} are not dense")
    return np.lib.stride_tricks.as_strided(
        array, (*lead, rows * columns), (*array.strides[:-2], array.itemsize)
    )


def _split_last(array: Array, sizes: tuple[int, int]) -> Array:
    item = array.itemsize
    return np.lib.stride_tricks.as_strided(
        array, (*array.shape[:-1], *sizes), (*array.strides[:-1], sizes[1] * item, item)
    )
