"""Checks that tensors are the pools that kvcached has made, and how many blocks they have.

kvcached has one size of block for all layers: pools of one size each, or one pool of all
layers. Its manager maps pages by that size, by ``KVCACHED_CONTIGUOUS_LAYOUT`` and by
``KVCACHED_PAGE_SIZE_MB``, in another process than the one that has the tensors. Where the
two disagree, pages are mapped where no block lies, and blocks lie in pages that are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.geometry.layout_strides import are_split, block_bytes
from kvpatch.geometry.plane import Plane, extent_bytes
from kvpatch.worker.registered_caches import LayerCache, is_as_planned, read_layers
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

if TYPE_CHECKING:
    import torch


#: From 0.1.6 on kvcached hangs a view of the layer's whole memory on each of its tensors.
_MARK = "_kvcached_block_copy_view"
_MIB = 1024**2


@dataclass(frozen=True)
class _Pool:
    address: int
    size_bytes: int
    layers: tuple[str, ...]


def check_pools(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, LayerCache]) -> None:
    """Refuses tensors that cannot be what kvcached has made.

    Args:
        layers: the attention layers among `kv_caches`, read.

    Raises:
        RegistrationRefused: with what was found, what was expected, and what to set.
    """
    tensors = {layer: kv_caches[layer] for layer in layers}
    pools = _pools(tensors)
    if not pools:
        return
    _check_marks(tensors, layers)
    _check_sizes(pools, layers)
    _check_layout(pools, layers, settings.kvcached_contiguous())
    _check_pages(pools, settings.kvcached_page_bytes())


def _pools(tensors: Mapping[str, torch.Tensor]) -> tuple[_Pool, ...]:
    found: dict[tuple[int, int], list[str]] = {}
    for layer, tensor in tensors.items():
        storage = tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), storage.nbytes()), []).append(layer)
    return tuple(_Pool(*place, tuple(layers)) for place, layers in found.items())


# --- whose memory it is ------------------------------------------------------------


def _check_marks(tensors: Mapping[str, Any], layers: Mapping[str, LayerCache]) -> None:
    marks = {
        layer: getattr(tensor, _MARK) for layer, tensor in tensors.items() if hasattr(tensor, _MARK)
    }
    for layer, mark in marks.items():
        start, end = _reach(mark)
        low, high = _span(layers[layer].planes)
        if low < start or high > end:
            raise RegistrationRefused(
                f"{layer} says that it lies in kvcached's pool at {start:#x} to {end:#x} and lies "
                f"at {low:#x} to {high:#x}: expected it inside, where kvcached maps pages. "
                "Something has replaced its memory since kvcached made it",
                "set ENABLE_KVCACHED=false where that is wanted",
            )
    storages = {layer: tensor.untyped_storage().data_ptr() for layer, tensor in tensors.items()}
    pools = {storages[layer] for layer in marks}
    foreign = [layer for layer, storage in storages.items() if marks and storage not in pools]
    if foreign:
        raise RegistrationRefused(
            f"{', '.join(marks)} are kvcached's and {', '.join(foreign)} lie in none of its "
            "pools: expected all attention layers there, whose pages it maps together",
            "set ENABLE_KVCACHED=false for this model",
        )


def _reach(view: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one past its last."""
    item = view.element_size()
    axes = [(size, stride * item) for size, stride in zip(view.shape, view.stride(), strict=True)]
    return view.data_ptr(), view.data_ptr() + extent_bytes(axes, item)


def _span(planes: tuple[Plane, ...]) -> tuple[int, int]:
    spans = [plane.span() for plane in planes]
    return min(low for low, _ in spans), max(high for _, high in spans)


# --- one size of block -------------------------------------------------------------


def _check_sizes(pools: tuple[_Pool, ...], layers: Mapping[str, LayerCache]) -> None:
    if len({pool.size_bytes for pool in pools}) > 1:
        raise RegistrationRefused(
            f"kvcached's pools have unlike sizes: {_listed(pools)}. Expected one size, or one "
            "pool of all layers: its manager maps pages for blocks of one size",
            "set ENABLE_KVCACHED=false for this model",
        )
    strides = {cache.planes[0].strides_bytes.block for cache in layers.values()}
    if len(pools) == 1 and len(strides) == 1:
        return  # cross-layer blocks have pages as a whole: layers may have several sizes
    sizes: dict[int, list[str]] = {}
    for layer, cache in layers.items():
        sizes.setdefault(_content_bytes(cache.planes), []).append(layer)
    if len(sizes) > 1:
        found = "; ".join(
            f"{block_bytes(layers[names[0]].planes)} bytes a block in {layers[names[0]].blocks} "
            f"blocks: {', '.join(names)}"
            for names in sizes.values()
        )
        raise RegistrationRefused(
            f"kvcached's layers have pages of unlike sizes: {found}. Expected blocks of one size "
            "in all, which its manager maps pages for",
            "set ENABLE_KVCACHED=false for this model",
        )


def _content_bytes(planes: tuple[Plane, ...]) -> int:
    """Returns the bytes of all blocks: kernel blocks of several sizes may cut one size of block."""
    return planes[0].counts.blocks * block_bytes(planes)


def _listed(pools: tuple[_Pool, ...]) -> str:
    return "; ".join(
        f"{pool.size_bytes} bytes at {pool.address:#x}: {', '.join(pool.layers)}" for pool in pools
    )


# --- what its variables say --------------------------------------------------------


def _check_layout(
    pools: tuple[_Pool, ...], layers: Mapping[str, LayerCache], contiguous: bool | None
) -> None:
    if contiguous and len(pools) > 1:
        raise RegistrationRefused(
            f"KVCACHED_CONTIGUOUS_LAYOUT=true and the layers lie in {len(pools)} allocations: "
            f"{_listed(pools)}. Expected one pool of all layers: {_READ_ANOTHER}",
            _ONE_VALUE,
        )
    if contiguous and any(are_split(cache.planes) for cache in layers.values()):
        raise RegistrationRefused(
            "KVCACHED_CONTIGUOUS_LAYOUT=true and the tensors keep the keys of all blocks before "
            f"the values of all: expected a block's bytes side by side. {_READ_ANOTHER}",
            _ONE_VALUE,
        )
    # Attention groups share a pool layer by layer, each at its beginning.
    shared = [p for p in pools if len({_span(layers[n].planes)[0] for n in p.layers}) > 1]
    if contiguous is False and shared:
        raise RegistrationRefused(
            "KVCACHED_CONTIGUOUS_LAYOUT=false and several layers lie side by side in one "
            f"allocation: {_listed(tuple(shared))}. Expected an allocation for each: "
            f"{_READ_ANOTHER}",
            _ONE_VALUE,
        )


_READ_ANOTHER = (
    "kvcached has read another value when it made them, and where its processes read unlike values "
    "pages are mapped at the wrong places"
)
_ONE_VALUE = "set KVCACHED_CONTIGUOUS_LAYOUT to one value before the engine and its workers start"


def _check_pages(pools: tuple[_Pool, ...], page_bytes: int | None) -> None:
    odd = tuple(pool for pool in pools if page_bytes and pool.size_bytes % page_bytes)
    if odd and page_bytes:
        raise RegistrationRefused(
            f"KVCACHED_PAGE_SIZE_MB={page_bytes // _MIB} and kvcached's pools are no whole number "
            f"of such pages: {_listed(odd)}. Expected multiples of {page_bytes} bytes: kvcached "
            "has read another value when it made them",
            "set KVCACHED_PAGE_SIZE_MB to one value before the engine and its workers start",
        )


def count_blocks(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> None:
    """Makes a worker plan as many blocks as its tensors have.

    Raises:
        RegistrationRefused: the tensors disagree.
    """
    layers = read_layers(release, kv_caches)
    kernel_blocks = release.planned_kernel_blocks or 1
    if not layers or is_as_planned(layers, release.planned_blocks, kernel_blocks):
        return
    if settings.is_kvcached_enabled() and not worker_state(release.worker).is_host_buffered:
        # Says more than the counts below can; a host buffer's tensors are not kvcached's.
        check_pools(kv_caches, layers)
    release.set_blocks(common_blocks(layers, kernel_blocks))


def common_blocks(layers: Mapping[str, LayerCache], kernel_blocks_per_block: int) -> int:
    """The number of logical blocks that every layer's tensor has.

    Raises:
        RegistrationRefused: they disagree, or a tensor ends in the middle of a logical block.
    """
    kernel_blocks = {layer: cache.blocks for layer, cache in layers.items()}
    counts = set(kernel_blocks.values())
    if len(counts) > 1 or max(counts) % kernel_blocks_per_block:
        listed = ", ".join(f"{layer}: {count}" for layer, count in kernel_blocks.items())
        raise RegistrationRefused(
            "all layers need one number of KV cache blocks, a multiple of "
            f"{kernel_blocks_per_block} (kernel blocks in a block), and have {listed}",
            "make the allocator hand out tensors of one size",
        )
    return counts.pop() // kernel_blocks_per_block
