"""Reads the caches that a worker is about to register into planes, or refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.core.errors import UnexpectedCaches, UnreadableGeometry
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.layout_strides import block_bytes
from kvpatch.geometry.plane import Content, Memory, Plane, TensorFacts
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.worker.cache_kinds import (
    BACKENDS,
    DERIVED,
    DERIVES,
    OF_SEVERAL,
    ROWS,
    SCALES_APART,
    SLOTS_BY_HEAD,
    SPECS,
    WITH_DTYPE,
    WITH_VARIABLE,
    Holds,
    Kind,
    unknown,
)
from kvpatch.worker.release_worker import ALL_LAYERS, ReleaseWorker

if TYPE_CHECKING:
    import torch

    from kvpatch.transfer.storageless import StoragelessCaches

#: Whose classes the table is about; others may have the same names. The second is the project's own
#: attention backend for a CPU, which no wheel has.
_PACKAGES = ("vllm.", "experiments.engines.torch_attention")


def kind_of(release: ReleaseWorker, layer: str, *, has_slots: bool = False) -> Kind:
    """Returns the kind of a layer's cache, by its spec and by the layer's own backend.

    Args:
        has_slots: True if a block has slots of all heads in place of heads (from 0.29).
    """
    configuration = release.worker.vllm_config
    spec, backend = release.spec_of(layer), backend_of_layer(configuration, layer)
    of_spec = None if spec is None else _by_spec(spec)
    found = of_spec or (ROWS if backend is None else kind_of_backend(backend))
    dtype = str(configuration.cache_config.cache_dtype)
    of_dtype = next((kind for start, kind in WITH_DTYPE.items() if dtype.startswith(start)), None)
    if dtype.endswith("_per_token_head") and release.facts.cache_shape != "packed":
        # 0.20 to 0.25.1 count where a scale lies as if tokens came before heads, in any layout.
        of_dtype = SCALES_APART
    if of_dtype is not None:
        found = of_dtype if found.holds is Holds.ROWS else replace(found, joins=False)
    if found is ROWS and dtype.startswith("fp8") and _has_own_scales(configuration.cache_config):
        found = replace(found, contents=f"{found.contents} by scales of its own", mixes_heads=True)
    if has_slots and found not in SLOTS_BY_HEAD:
        return replace(found, holds=Holds.WHOLE, mixes_heads=True, joins=False)
    return found


def _has_own_scales(cache_config: Any) -> bool:
    """True if each rank works out its scales (0.11.1 to 0.27), which nobody is told."""
    return bool(getattr(cache_config, "calculate_kv_scales", False))


def has_slots(release: ReleaseWorker, layer: str) -> bool:
    """True if a layer's blocks have slots in place of heads, by its spec (from 0.29)."""
    return getattr(release.spec_of(layer), "num_head_slots", None) is not None


def kind_of_backend(backend: type) -> Kind:
    """Returns what a backend's blocks hold; one that vLLM derives for a purpose holds the same."""
    name = backend.__name__
    if backend.__module__.startswith(_PACKAGES):
        # Made of two, under another name (from 0.30): both read and write the blocks.
        routes = (getattr(backend, f"{one}_backend_cls", None) for one in ("general", "causal"))
        kinds = [kind_of_backend(each) for each in routes if isinstance(each, type)]
        strange = [kind for kind in kinds if not kind.is_known]
        if kinds:
            return (strange or kinds)[0] if strange or len(set(kinds)) == 1 else OF_SEVERAL
    for kind in backend.__mro__:
        of_vllm = kind.__module__.startswith(_PACKAGES)
        if not of_vllm or kind.__name__ not in BACKENDS or not name.endswith(kind.__name__):
            continue
        prefix = name.removesuffix(kind.__name__)
        if prefix and prefix not in DERIVED and not DERIVES.fullmatch(prefix):
            continue
        variable = WITH_VARIABLE.get(kind.__name__)
        found = variable[1] if variable and _is_set(variable[0]) else BACKENDS[kind.__name__]
        if prefix not in DERIVED:
            return found
        derived = DERIVED[prefix]
        return derived if found.holds is Holds.ROWS else replace(derived, joins=False)
    return unknown(f"{backend.__module__}.{name}, an attention backend")


def _by_spec(spec: Any) -> Kind | None:
    """Returns what a spec says beside its backend; None for nothing."""
    name = type(spec).__name__
    if name not in SPECS or not type(spec).__module__.startswith(_PACKAGES):
        return unknown(f"{type(spec).__module__}.{name}, a KVCacheSpec")
    return SPECS[name]


def backend_of_layer(configuration: Any, layer: str) -> Any:
    """Returns a layer's backend; None if it does not say (any on 0.10.0; with states <= 0.10.1)."""
    layers = configuration.compilation_config.static_forward_context
    ask = getattr(layers.get(layer), "get_attn_backend", None)
    return None if ask is None else ask()


def _is_set(variable: str) -> bool:
    from vllm import envs

    return bool(getattr(envs, variable, False))


@dataclass(frozen=True)
class LayerCache:
    """The cache of one attention layer, read from its tensor."""

    order: DimensionOrder
    planes: tuple[Plane, ...]
    kind: Kind = ROWS

    @property
    def blocks(self) -> int:
        """Kernel blocks in the tensor."""
        return self.planes[0].counts.blocks

    @property
    def has_heads(self) -> bool:
        """True if ranks hold heads of it; the latents of MLA are whole on each."""
        return self.planes[0].content is not Content.LATENT

    @property
    def has_heads_by_turns(self) -> bool:
        """True if a token's key and value heads lie by turns (TPU), in whatever layout is stated.

        Such a backend has one layout, and states the one that the connector asked for.
        """
        return "packed_head" in self.order.dimensions


@dataclass(frozen=True)
class DeviceCaches:
    """The device's caches, where a host buffer's are registered in their place.

    Attributes:
        tensors: by layer, or what geometry is shown where those have no storage.
        caches: places reads on a device whose tensors have no storage; None elsewhere.
    """

    tensors: Mapping[str, torch.Tensor]
    caches: StoragelessCaches | None

    @property
    def device(self) -> torch.device:
        """The device that reads are placed on."""
        caches = self.caches
        return next(iter(self.tensors.values())).device if caches is None else caches.device


def read_layers(
    release: ReleaseWorker,
    kv_caches: Mapping[str, Any],
    key_order: KeyOrder = KeyOrder.ROW_MAJOR,
    first_head: int = 0,
) -> dict[str, LayerCache]:
    """Every attention layer's cache; recurrent state and flat buffers are left out.

    Args:
        key_order: how keys lie in a block; counting blocks does not need it.
        first_head: the global number of this rank's first KV head.
    """
    if not kv_caches:
        raise UnexpectedCaches("no layer's KV cache was handed to the registration")
    if _is_of_all_layers(release, kv_caches):
        # Laid out by the release itself, which compares its block count with the plan.
        return {}
    _check_layers(release.expected_layers, kv_caches)
    found = {
        layer: _read(release, layer, cache, key_order, first_head)
        for layer, cache in kv_caches.items()
        if release.is_readable(layer, cache)
    }
    return {layer: read for layer, read in found.items() if read is not None}


def _is_of_all_layers(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> bool:
    """True if the release hands over one tensor of all layers (``enable_cross_layers_blocks``)."""
    if ALL_LAYERS in kv_caches:  # <= 0.17
        return True
    # 0.18 to 0.28 give it the name of the first layer, whose own tensor has a dimension less.
    (layer, cache), *others = kv_caches.items()
    if others or settings.is_kvcached_enabled() or not release.is_readable(layer, cache):
        return False
    return bool(cache.dim() == 1 + len(release.orders(layer)[0].dimensions))


def _read(
    release: ReleaseWorker, layer: str, cache: torch.Tensor, key_order: KeyOrder, first_head: int
) -> LayerCache | None:
    """A layer's tensor; None where its blocks hold no rows and nobody knows its dimensions."""
    try:
        own = backend_of_layer(release.worker.vllm_config, layer)
        if not release.facts.names_layouts and own in release.attention_backends:
            release.order_of_backend(own)  # its tensor may fit another one's order
        order = order_of(layer, cache, release.orders(layer))
        planes = read_planes(layer, tensor_facts(cache), order, key_order, first_head)
    except UnreadableGeometry:
        if kind_of(release, layer).holds is Holds.ROWS:
            raise
        return None
    kind = kind_of(release, layer, has_slots="slot" in order.dimensions)
    if kind.holds is not Holds.ROWS:
        planes = tuple(replace(plane, is_whole=True) for plane in planes)
    if planes[0].content is Content.LATENT:  # all ranks have the same one, whatever their heads
        planes = tuple(replace(plane, first_head=0) for plane in planes)
    return LayerCache(order, planes, kind)


def order_of(layer: str, cache: torch.Tensor, orders: tuple[DimensionOrder, ...]) -> DimensionOrder:
    """The one of `orders` that a tensor's shape fits; earlier ones win."""
    shape = tuple(cache.shape)
    for order in orders:
        if len(order.dimensions) != len(shape):
            continue
        if "kv" in order.dimensions and shape[order.dimensions.index("kv")] != 2:
            continue
        return order
    known = " or ".join(f"[{', '.join(order.dimensions)}]" for order in orders)
    raise UnreadableGeometry(
        f"layer {layer}: a tensor of shape {shape} and strides {tuple(cache.stride())} is none of "
        f"{known}, which this release's attention backend uses"
    )


def _check_layers(expected: frozenset[str] | int, kv_caches: Mapping[str, Any]) -> None:
    if isinstance(expected, int):
        if len(kv_caches) < expected:
            raise UnexpectedCaches(
                f"{len(kv_caches)} layers were handed to the registration and the model has "
                f"{expected}: {', '.join(sorted(kv_caches))}"
            )
        return
    missing = expected - kv_caches.keys()
    if missing:
        raise UnexpectedCaches(
            f"the registration was handed no KV cache for {', '.join(sorted(missing))}: every "
            "layer of the plan needs one, or its blocks never move"
        )


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    """Returns a tensor's place and strides; reads no element."""
    storage = tensor.untyped_storage()
    on_host = tensor.device.type == "cpu"
    return TensorFacts(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        item_bytes=tensor.element_size(),
        # torch counts host memory as device -1, NIXL as device 0.
        memory=Memory("DRAM" if on_host else "VRAM", max(tensor.get_device(), 0)),
        storage_address=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
    )


def page_bytes_of(layer: LayerCache) -> int:
    """Returns the bytes of one of a layer's kernel blocks."""
    return block_bytes(layer.planes)


def differ_in_page_bytes(layers: Mapping[str, LayerCache]) -> bool:
    """True if blocks of some layers have more bytes than those of others."""
    return len({page_bytes_of(layer) for layer in layers.values()}) > 1


def differ_in_shape(layers: Mapping[str, LayerCache]) -> bool:
    """True if the heads, tokens or widths of layers with heads differ from one another."""
    with_heads = [layer.planes for layer in layers.values() if layer.has_heads]
    return len({tuple(plane.counts[1:] for plane in planes) for planes in with_heads}) > 1


def is_as_planned(
    layers: Mapping[str, LayerCache], planned: int | None, kernel_blocks_per_block: int
) -> bool:
    """True if every tensor has the planned blocks, counted as logical or as kernel blocks.

    The hybrid allocator hands out some of each where the two differ in size.
    """
    if planned is None:
        return False
    return {c.blocks for c in layers.values()} <= {planned, planned * kernel_blocks_per_block}
