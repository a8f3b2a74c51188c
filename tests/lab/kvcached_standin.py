"""kvcached's real Python view code over a stand-in for its compiled part.

STAND-IN: the compiled part needs CUDA. Here its tensors lie in host memory that is
reserved and not accessible (``mmap``, ``PROT_NONE``): a page can be read and written from
:meth:`Reservation.map` on until :meth:`Reservation.unmap`. kvcached itself maps one page of
zeros everywhere instead, so that a stray access shows nothing; here it ends the process.

CUDA's driver, which knows what is mapped, is stood in for too: it answers with the page's
own allocation or, where there is none, with one that all unmapped pages share, as kvcached's
page of zeros is.

What the layouts are, their strides, and how many blocks a reservation holds is all
decided by kvcached's own ``alloc_kv_cache``, which is its way <= 0.28, or by its
``model_runner_v2`` over a plan of the release's (:func:`allocate_planned`).
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvpatch.kvcached import transports
from kvpatch.kvcached.transports import Port
from kvpatch.load import mapped_pages
from tests.releases import kvcached

from .compare import Array

#: Small, so that a cache of some blocks has many; kvcached's have 2 MiB and more.
PAGE_BYTES = 16 * 1024
#: Of kvcached's real pages, whose sizes the lab's go up to.
_MOST_PAGE_BYTES = 2 * 1024**2
_MODULE = "kvcached.integration.vllm.model_runner_v2"
#: The setting with a network card that kvpatch is told of, as if this memory were a GPU's.
CARD = "LAB_NETWORK_CARD"

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_C.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_PAGE_OF_ZEROS = 1


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass
class Reservation:
    """One of kvcached's tensors: virtual memory, and the pages of it that are there.

    All others read as zeros, as kvcached's do, and nobody can write to them.
    """

    size_bytes: int
    page_bytes: int
    address: int = 0
    mapped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        aligned = _COMPILED.page_bytes  # as kvcached's are
        found = _C.mmap(None, self.size_bytes + aligned, mmap.PROT_READ, flags, -1, 0)
        if found == _FAILED or found is None:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = -(-found // aligned) * aligned

    def map(self, page: int) -> None:
        start = self.address + page * self.page_bytes
        _check(_C.mprotect(start, self.page_bytes, mmap.PROT_READ | mmap.PROT_WRITE))
        self.mapped.add(page)

    def unmap(self, page: int) -> None:
        """Takes a page's memory and its contents away."""
        start = self.address + page * self.page_bytes
        _check(_C.madvise(start, self.page_bytes, mmap.MADV_DONTNEED))
        _check(_C.mprotect(start, self.page_bytes, mmap.PROT_READ))
        self.mapped.discard(page)

    def pages_of(self, addresses: Iterable[tuple[int, int]]) -> set[int]:
        """The pages in which (address, bytes) lie."""
        found: set[int] = set()
        for address, length in addresses:
            offset = address - self.address
            found |= set(range(offset // self.page_bytes, -(-(offset + length) // self.page_bytes)))
        return found

    def bytes_at(self, page: int) -> Array:
        """A page that is there."""
        raw = (ctypes.c_uint8 * self.page_bytes).from_address(self.address + page * self.page_bytes)
        return np.frombuffer(raw, dtype=np.uint8)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, without a look at it."""
        raw = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


#: Of this process; none is ever given back.
_RESERVATIONS: list[Reservation] = []


def _allocation_at(address: int) -> int | None:
    for reservation in _RESERVATIONS:
        offset = address - reservation.address
        if 0 <= offset < reservation.size_bytes:
            page = offset // reservation.page_bytes
            start = reservation.address + page * reservation.page_bytes
            return start if page in reservation.mapped else _PAGE_OF_ZEROS
    return None


@dataclass(frozen=True)
class Allocation:
    """What kvcached handed out.

    Attributes:
        tensors: a view for each layer.
        reservations: the memory behind them.
        others: views of other shapes over the same memory.
        states: views of recurrent state over the same memory, a list for each layer.
    """

    tensors: list[torch.Tensor]
    reservations: list[Reservation]
    others: tuple[list[torch.Tensor], ...] = ()
    states: tuple[torch.Tensor | list[torch.Tensor], ...] = ()


class _Compiled:
    """Stands in for the C++ allocator: reserves what it would, and maps nothing."""

    def __init__(self) -> None:
        self.contiguous = False
        self.page_bytes = PAGE_BYTES
        self.reservations: list[Reservation] = []

    def create_kv_tensors(
        self,
        size_bytes: int,
        item_bytes: int,
        device: str,
        layers: int,
        *,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        unified_pool: bool = False,
    ) -> list[torch.Tensor]:
        dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[item_bytes]
        if self.contiguous:
            whole = Reservation(size_bytes * layers, self.page_bytes * layers * num_kv_buffers)
            self.reservations = [whole]
        else:
            self.reservations = [Reservation(size_bytes, self.page_bytes) for _ in range(layers)]
        _RESERVATIONS.extend(self.reservations)
        return [reservation.tensor(dtype) for reservation in self.reservations]


_COMPILED = _Compiled()


def use_pages(size_bytes: int) -> None:
    """Makes this the size of a page, to the allocator and to what stands in for the driver."""
    _COMPILED.page_bytes = size_bytes
    mapped_pages.driver = lambda: mapped_pages.Driver(_allocation_at, size_bytes)
    card = os.environ.get(CARD)
    if card:
        transports.active_ports = lambda: (Port(card, "1", "InfiniBand"),)
        gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        transports.tensors_of = lambda _: [gpu]


def interfaces() -> Any:
    """kvcached's own module of views, with the compiled part stood in for."""
    name = "kvcached.integration.vllm.interfaces"
    if name in sys.modules:
        return sys.modules[name]
    source = str(kvcached.tree(kvcached.NEWEST))
    if source not in sys.path:
        sys.path.append(source)
    compiled = types.ModuleType("kvcached.vmm_ops")
    compiled.__getattr__ = lambda attribute: getattr(_COMPILED, attribute, None)  # type: ignore[method-assign]
    sys.modules["kvcached.vmm_ops"] = compiled
    return importlib.import_module(name)


def allocate(
    shape: Sequence[int],
    block_tokens: int,
    dtype: torch.dtype,
    layers: int,
    *,
    contiguous: bool,
    attention: str,
    layout: str,
    virtual_blocks: int,
    kernel_block_tokens: int | None = None,
    other_shapes: Sequence[tuple[Sequence[int], int]] = (),
    state_spec: Any = None,
    states_apart: bool = True,
) -> Allocation:
    """Has kvcached lay out a cache; nothing of it can be accessed yet.

    Args:
        shape: as the release's backend gives it.
        virtual_blocks: about how many blocks the device's memory stands for.
        other_shapes: (shape, tokens of a block) of groups that have another, in blocks of as
            many bytes.
        state_spec: of the layers with recurrent state that share these layers' memory.
        states_apart: whether each of a layer's states is a tensor, or all are a page of one.
    """
    theirs = interfaces()
    contents = 1 if attention == "MLA" else 2
    block = 1
    for size in shape:
        block *= size
    blocks = shape[1] if len(shape) == 5 and shape[0] == 2 else shape[0]
    block_bytes = block // blocks * dtype.itemsize
    pages = -(-virtual_blocks * block_bytes // contents // PAGE_BYTES)
    pages += pages % 2
    device = types.SimpleNamespace(
        is_available=lambda: True,
        get_device_properties=lambda _: types.SimpleNamespace(
            total_memory=pages * PAGE_BYTES * contents * layers
        ),
    )
    use_pages(PAGE_BYTES)
    # The device that kvcached asks for its memory, and pages that a test can fill.
    theirs.torch = _Torch(device)
    theirs.PAGE_SIZE = PAGE_BYTES
    theirs.normalize_gpu_device = lambda name: name
    theirs._kvcached_initialized = True
    theirs._contiguous_layout = _COMPILED.contiguous = contiguous
    *found, made = theirs.alloc_kv_cache(
        tuple(shape),
        block_tokens,
        dtype,
        "cuda:0",
        layers,
        attention_type=attention,
        kv_layout=layout,
        kernel_block_size=kernel_block_tokens,
        return_meta=True,
    )
    tensors = found[0]
    others = [
        theirs.build_kv_views(
            made["raw_kv_tensors"],
            tuple(other),
            tokens,
            dtype,
            attention,
            made["num_blocks_per_layer"],
            made["gpu_mem_bytes_per_layer_k_or_v"],
            made["num_layers"],
            kv_layout=layout,
        )[0]
        for other, tokens in other_shapes
    ]
    states = []
    if state_spec is not None:
        # Its patches of vLLM's runner, for what they make of the pool; nothing is patched.
        patches = importlib.import_module("kvcached.integration.vllm.patches")
        for layer in range(layers):
            states.append(_states(patches, found[1], state_spec, layer, apart=states_apart))
    return Allocation(list(tensors), list(_COMPILED.reservations), tuple(others), tuple(states))


def _states(
    patches: Any, pool: dict[str, Any], spec: Any, layer: int, *, apart: bool
) -> torch.Tensor | list[torch.Tensor]:
    def size_of(dtype: torch.dtype) -> int:
        return dtype.itemsize

    if not apart:
        return patches._reshape_mamba_page_tensor(pool, spec, layer)  # type: ignore[no-any-return]
    if pool["is_contiguous"]:
        return list(patches._reshape_mamba_contiguous(pool, spec, layer, size_of))
    return list(patches._reshape_mamba_non_contiguous(pool["buffers"][layer], spec, size_of))


class _Torch:
    """torch, with a device of the size that a case needs."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# -- from vLLM 0.29 on: raw memory that the release's own code views ---------------------------


@dataclass(frozen=True)
class Planned:
    """What kvcached handed out: every layer's tensor, and the memory behind them."""

    tensors: Mapping[str, torch.Tensor]
    reservations: tuple[Reservation, ...]


def allocate_planned(
    plan: Any,
    layout: str,
    kernel_block_tokens: Sequence[int],
    *,
    contiguous: bool,
    virtual_blocks: int,
    page_bytes: int = PAGE_BYTES,
) -> Planned:
    """Has kvcached allocate a plan, as from vLLM 0.29 on; nothing of it can be accessed yet.

    kvcached's real ``model_runner_v2`` reserves a pool (or one for each layer of a group) and has
    the release's real ``create_kv_cache_views`` lay out the plan that the release's real planner
    made. 0.1.6 starts on 0.29 and 0.30 alone; on later releases this is its code for 0.30 over
    their views, which no kvcached runs.

    Args:
        plan: the release's own ``KVCacheConfig``.
        layout: the release's name of it.
        kernel_block_tokens: of each cache group.
        virtual_blocks: about how many blocks the device's memory stands for.
        page_bytes: of a page at least.

    Raises:
        KVCachedConfigError: kvcached does not serve it.
    """
    from vllm.v1.kv_cache_interface import KVCacheLayout

    interfaces()._kvcached_initialized = True
    theirs = importlib.import_module(_MODULE)
    theirs.CONTIGUOUS_LAYOUT = _COMPILED.contiguous = contiguous
    theirs.PAGE_SIZE, geometry = _page_and_geometry(theirs, plan, page_bytes)
    use_pages(theirs.PAGE_SIZE)
    pages = -(-virtual_blocks * geometry.page_bytes // theirs.PAGE_SIZE)
    memory_bytes = pages * theirs.PAGE_SIZE * geometry.num_pools
    device = types.SimpleNamespace(total_memory=memory_bytes)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda _: device):
        tensors = theirs.allocate_kv_cache(
            plan, "cuda:0", KVCacheLayout[layout], list(kernel_block_tokens)
        )
    return Planned(tensors, tuple(_COMPILED.reservations))


def _page_and_geometry(theirs: Any, plan: Any, page_bytes: int) -> tuple[int, Any]:
    """The smallest page from that size on that kvcached can manage this plan's blocks in."""
    while True:
        theirs.PAGE_SIZE = page_bytes
        try:
            return page_bytes, theirs.cache_geometry(plan)
        except theirs.KVCachedConfigError:
            page_bytes *= 2
            if page_bytes > _MOST_PAGE_BYTES:
                raise
