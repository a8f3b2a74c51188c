"""How each generation's worker reads the caches that it registers.

On releases <= 0.17 the worker takes the number of blocks from the tensors; from 0.18 it
takes it from the plan. Which tensor dimension means what is told by flags, by
the topology's backend, by the worker's backends, or, from 0.29, by the one
logical shape that is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpatch.connector.local.kv_cache_groups import Group, one_group, planned_groups
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import DimensionOrder, KeyOrder

#: The name under which a tensor of all layers together is registered (0.13 to 0.28).
ALL_LAYERS = "ALL_LAYERS"

KEYS_FIRST = DimensionOrder(("kv", "block", "token", "head", "channel"))
BLOCKS_FIRST = DimensionOrder(("block", "kv", "token", "head", "channel"))
PACKED = DimensionOrder(("block", "head", "token", "packed"))
LATENT = DimensionOrder(("block", "token", "channel"))
LATENT_HEADS = DimensionOrder(("block", "head", "token", "channel"))
SLOTS = DimensionOrder(("block", "slot", "token", "channel"))
INTERLEAVED_HEADS = DimensionOrder(("block", "token", "packed_head", "channel"))


@dataclass(frozen=True)
class Registration:
    """One generation's ways; every function takes the worker first.

    Attributes:
        orders: the dimension orders that a layer's attention tensor can have.
        layers: the layers that must be registered, or how many, if it knows.
        is_readable: whether a layer's tensor is an attention cache in blocks, and
            not recurrent state, a flat buffer or a pool of other block count.
        planned_blocks: how many logical blocks it will register; None where it
            asks the tensors.
        set_blocks: makes it register another number of logical blocks.
        kernel_blocks_per_block: kernel blocks in a logical block; None where it
            finds out from the tensors.
        key_order: how the backend lays keys inside a block; None where nobody knows.
        groups: the cache groups of these layers.
        admit_peers: lets a peer of larger blocks reach the handshake's own checks.
        show_split: takes caches whose keys and values are regions of their own,
            blocks first, and returns what its registration must be handed.
    """

    orders: Callable[[Any, str], tuple[DimensionOrder, ...]]
    layers: Callable[[Any], frozenset[str] | int]
    is_readable: Callable[[Any, str, Any], bool]
    planned_blocks: Callable[[Any], int | None]
    set_blocks: Callable[[Any, int], None]
    kernel_blocks_per_block: Callable[[Any], int | None]
    key_order: Callable[[Any], KeyOrder | None]
    groups: Callable[[Any, Iterable[str]], tuple[Group, ...]]
    admit_peers: Callable[[Any], None]
    show_split: Callable[[Any, Mapping[str, Any]], dict[str, Any]]


# --- dimension orders -------------------------------------------------------


def _orders_by_flag(worker: Any, layer: str) -> tuple[DimensionOrder, ...]:
    if worker.use_mla:
        return (LATENT,)
    # Neither in 0.10.0; the second is 0.11.0's.
    if getattr(worker, "_use_pallas_v1", False) or getattr(worker, "_use_pallas", False):
        return (INTERLEAVED_HEADS,)
    return (BLOCKS_FIRST if worker._use_flashinfer else KEYS_FIRST,)


def _orders_by_topology(worker: Any, layer: str) -> tuple[DimensionOrder, ...]:
    return (_order_of(worker.kv_topo.attn_backend),)


def _orders_by_backend(worker: Any, layer: str) -> tuple[DimensionOrder, ...]:
    return (_order_of(worker.attn_backend),)


def _orders_by_backends(worker: Any, layer: str) -> tuple[DimensionOrder, ...]:
    return tuple(dict.fromkeys(_order_of(backend) for backend in attention_backends(worker)))


def attention_backends(worker: Any) -> tuple[Any, ...]:
    """A worker's backends, without those of recurrent state, whose caches have no tokens."""
    return tuple(backend for backend in worker.attn_backends if not _is_of_state(backend))


def _is_of_state(backend: Any) -> bool:
    says = getattr(backend, "is_ssm", None)  # from 0.20
    if says is not None:
        return bool(says())
    return "get_kv_cache_shape" in getattr(backend, "__abstractmethods__", ())


def _orders_packed(worker: Any, layer: str) -> tuple[DimensionOrder, ...]:
    # An allocator that keeps keys and values apart needs a fifth dimension here too.
    return (*_orders_by_backends(worker, layer), BLOCKS_FIRST)


def _orders_by_name(worker: Any, layer: str) -> tuple[DimensionOrder, ...]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    spec = _spec_of(worker, layer)
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        return (LATENT_HEADS, LATENT)
    if getattr(spec, "num_head_slots", None) is not None:
        return (SLOTS,)
    return (DimensionOrder(PACKED.dimensions, key_channels=_key_channels(spec)), BLOCKS_FIRST)


def _key_channels(spec: Any) -> int | None:
    """The width of the keys where values have another; the tensor tells only the sum."""
    value_channels = getattr(spec, "head_size_v", spec.head_size)
    return None if value_channels == spec.head_size else int(spec.head_size)


def _order_of(backend: Any) -> DimensionOrder:
    return DimensionOrder.probe(backend.get_kv_cache_shape)


# --- which layers there must be ---------------------------------------------


def _layers_of_model(worker: Any) -> int:
    configuration = worker.vllm_config
    model = configuration.model_config
    return int(model.get_num_layers_by_block_type(configuration.parallel_config))


def _layers_of_plan(worker: Any) -> frozenset[str]:
    return frozenset(worker._layer_specs)


# --- what can be read -------------------------------------------------------


def _is_tensor(worker: Any, layer: str, cache: Any) -> bool:
    return hasattr(cache, "untyped_storage")


def _is_attention(worker: Any, layer: str, cache: Any) -> bool:
    from vllm.v1.kv_cache_interface import AttentionSpec

    # Flat buffers, and pages of bytes that only the plan tells how to read.
    if not _is_tensor(worker, layer, cache) or cache.ndim < 3:
        return False
    return isinstance(_spec_of(worker, layer), AttentionSpec)


def _spec_of(worker: Any, layer: str) -> Any:
    """The layer's own spec; None for one that only shares another layer's cache."""
    spec = worker._layer_specs.get(layer)
    of_layers = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
    return of_layers[layer] if of_layers else spec


def _is_block_attention(worker: Any, layer: str, cache: Any) -> bool:
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    if not _is_attention(worker, layer, cache):
        return False
    spec = _spec_of(worker, layer)
    # Rings hold a block a request; a compressed cache may be viewed in pages that
    # run across other layers' blocks: neither tells how many blocks there are.
    if isinstance(spec, CircularBufferSpec) or spec.tokens_per_state > 1:
        return False
    # A host-resident group (0.30 on) counts the blocks of its own pool.
    groups = worker.kv_cache_config.transfer_groups
    return not any(
        getattr(group, "host_resident", False) and layer in group.layer_names for group in groups
    )


# --- block counts -----------------------------------------------------------


def _no_plan(worker: Any) -> None:
    return None


def _keep_blocks(worker: Any, blocks: int) -> None:
    """These generations ask the first tensor; all agreed before this is called."""


def _planned_blocks(worker: Any) -> int:
    return int(worker._logical_num_blocks)


def _kernel_blocks_per_block(worker: Any) -> int:
    return int(worker._physical_blocks_per_logical_kv_block)


def _set_blocks(worker: Any, blocks: int) -> None:
    worker._logical_num_blocks = blocks
    worker.num_blocks = blocks * _kernel_blocks_per_block(worker)


def _set_planned_blocks(worker: Any, blocks: int) -> None:
    _set_blocks(worker, blocks)
    # A copy: the engine and other workers go on reading their own plan.
    worker.kv_cache_config = replace(worker.kv_cache_config, num_blocks=blocks)


# --- how keys lie inside a block ---------------------------------------------


def _row_major(worker: Any) -> KeyOrder:
    return KeyOrder.ROW_MAJOR


def _by_cpu_kernel(worker: Any) -> KeyOrder | None:
    # The worker's own name is its first backend's, which may be one of recurrent state.
    several = hasattr(worker, "attn_backends")  # from 0.18
    found = [b.get_name() for b in attention_backends(worker)] if several else [worker.backend_name]
    if not set(found).isdisjoint(_PACKS_KEYS):
        return None
    if "CPU_ATTN" not in found:
        return KeyOrder.ROW_MAJOR
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = worker.vllm_config.model_config
    # Tiles of keys (AMX) are laid out by the hardware's rules, not by strides.
    is_by_column = _get_attn_isa(model.dtype, worker.block_size) in ("vec", "vec16")
    return KeyOrder.COLUMN_MAJOR if is_by_column else None


#: Backends whose kernels pack keys in a way that their tensors' shapes do not tell.
_PACKS_KEYS = ("ROCM_ATTN", "ROCM_FLASH")


# --- peers with larger blocks -----------------------------------------------


class _AnyPeerFits(int):
    """A block size to which every peer's is small enough; in all else the number itself.

    0.11.1 to 0.13 compare the two before the handshake gets to where a peer is
    read, in a background thread, while others use the number.
    """

    def __ge__(self, other: object) -> bool:
        return True


def _admit_any_block_size(worker: Any) -> None:
    if "block_size" in vars(worker.kv_topo):
        # 0.11.1 and 0.11.2: still of the blocks before they were cut into kernel blocks, so
        # that every handshake of a worker that cuts its own fails. 0.12 asks the worker.
        worker.kv_topo.block_size = worker.block_size
    worker.block_size = _AnyPeerFits(worker.block_size)


def _admit(worker: Any) -> None:
    """Nothing stands before the handshake's own checks."""


# --- keys and values in regions of their own --------------------------------


def _keys_first(kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    return {layer: cache.transpose(0, 1) for layer, cache in kv_caches.items()}


def _split_by_flag(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    worker._use_flashinfer = False
    return _keys_first(kv_caches)


def _split_by_topology(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    worker.kv_topo._is_kv_layout_blocks_first = False
    return _keys_first(kv_caches)


def _split_by_backend(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    worker.attn_backend = _with_keys_first(worker.attn_backend)
    return _keys_first(kv_caches)


def _split_by_backends(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    # The topology is made while registering and asks the first backend.
    worker.attn_backends = [
        b if _is_of_state(b) else _with_keys_first(b) for b in worker.attn_backends
    ]
    return _keys_first(kv_caches)


def _with_keys_first(backend: type) -> type:
    """The backend as this worker must see it; the backend itself is not touched."""

    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    shape = {"get_kv_cache_shape": staticmethod(get_kv_cache_shape)}
    return type(backend.__name__, (backend,), shape)


def _split_by_layer(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    storages = {cache.untyped_storage().data_ptr() for cache in kv_caches.values()}
    if len(storages) == 1:
        raise RegistrationRefused(
            f"{len(kv_caches)} layers keep keys and values apart in one allocation, which this "
            "release takes for blocks that hold all layers: give each layer an allocation"
        )
    return _as_layers(worker, kv_caches)


def _split_by_group(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    shown = _as_layers(worker, kv_caches)
    configuration = worker.kv_cache_config
    groups = []
    for group in configuration.kv_cache_groups:
        names = [n for layer in group.layer_names for n in _halves(layer)]
        groups.append(replace(group, layer_names=names))
    worker.kv_cache_config = replace(configuration, kv_cache_groups=groups)
    return shown


def _as_layers(worker: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """One region a layer is all these generations know: each half becomes a layer."""
    shown = {}
    specs = dict(worker._layer_specs)
    for layer, cache in kv_caches.items():
        half = _half_page(_spec_of(worker, layer))
        del specs[layer]
        for part, name in enumerate(_halves(layer)):
            shown[name] = cache.select(1, part)
            specs[name] = half
    worker._layer_specs = specs
    return shown


def _halves(layer: str) -> tuple[str, str]:
    return f"{layer}.keys", f"{layer}.values"


def _half_page(spec: Any) -> Any:
    """A spec of the same kind whose page holds one of keys and values."""
    kind = type(spec)
    page_bytes = spec.page_size_bytes // 2
    half_kind = type(kind.__name__, (kind,), {"page_size_bytes": property(lambda _: page_bytes)})
    half = copy.copy(spec)
    object.__setattr__(half, "__class__", half_kind)
    return half


# --- the table --------------------------------------------------------------

_TENSORS_COUNT = Registration(
    orders=_orders_by_flag,
    layers=_layers_of_model,
    is_readable=_is_tensor,
    planned_blocks=_no_plan,
    set_blocks=_keep_blocks,
    kernel_blocks_per_block=_no_plan,
    key_order=_row_major,
    groups=one_group,
    admit_peers=_admit,
    show_split=_split_by_flag,
)
_BY_TOPOLOGY = replace(
    _TENSORS_COUNT,
    orders=_orders_by_topology,
    key_order=_by_cpu_kernel,
    show_split=_split_by_topology,
)
_BEHIND_A_CHECK = replace(_BY_TOPOLOGY, admit_peers=_admit_any_block_size)
_BY_BACKEND = replace(_BY_TOPOLOGY, orders=_orders_by_backend, show_split=_split_by_backend)
_PLAN_COUNTS = Registration(
    orders=_orders_by_backends,
    layers=_layers_of_plan,
    is_readable=_is_attention,
    planned_blocks=_planned_blocks,
    set_blocks=_set_blocks,
    kernel_blocks_per_block=_kernel_blocks_per_block,
    key_order=_by_cpu_kernel,
    groups=planned_groups,
    admit_peers=_admit,
    show_split=_split_by_backends,
)
_ONE_REGION = replace(_PLAN_COUNTS, orders=_orders_packed, show_split=_split_by_layer)
_NAMED_LAYOUTS = replace(
    _ONE_REGION,
    orders=_orders_by_name,
    is_readable=_is_block_attention,
    set_blocks=_set_planned_blocks,
    show_split=_split_by_group,
)


def registration_of(facts: ReleaseFacts) -> Registration:
    """How a release's worker reads the caches that it registers."""
    if facts.compares_block_sizes_first:
        return _BEHIND_A_CHECK
    if facts.shape_source == "backends":
        return _ONE_REGION if facts.cache_shape == "packed" else _PLAN_COUNTS
    return {
        "flags": _TENSORS_COUNT,
        "topology": _BY_TOPOLOGY,
        "backend": _BY_BACKEND,
        "layout name": _NAMED_LAYOUTS,
    }[facts.shape_source]
