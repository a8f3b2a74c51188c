"""A worker's host buffer: what is registered with NIXL in place of the device's tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused, UnexpectedCaches
from kvpatch.core.proxies import ObjectProxy
from kvpatch.core.releases import ReleaseFacts
from kvpatch.host_buffer.host_pool import CANNOT, HostPool, block_bytes, mirror_bytes
from kvpatch.host_buffer.policy import host_blocks_in, supported_devices
from kvpatch.host_buffer.scheduler import StepSaves
from kvpatch.kvcached.pools import check_pools
from kvpatch.load.mapped_pages import MappedPages, pages_behind
from kvpatch.observe.book import Book
from kvpatch.observe.catalogue import SAVE_SECONDS, SAVED_BLOCKS
from kvpatch.transfer.storageless import StoragelessCaches, has_storage, shown
from kvpatch.worker.local_geometry import state_layout_of_strides
from kvpatch.worker.registered_caches import DeviceCaches, is_as_planned, read_layers
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.host_buffer")


@dataclass(eq=False)
class HostBuffer:
    """The host buffer of one worker.

    Attributes:
        pool: whose tensors are registered.
        book: of the worker, which is told of saves.
        saved_blocks: so far.
        save_seconds: that these took of the steps; on a device with streams, asking for them.
    """

    pool: HostPool
    book: Book
    saved_blocks: int = 0
    save_seconds: float = 0.0

    def save(self, saves: StepSaves) -> None:
        """Copies blocks that the model has written; all earlier ones are there at a prompt's end.

        Raises:
            RegistrationRefused: the scheduler believes in host blocks that there are not.
        """
        if saves.buffer_blocks > self.pool.host_blocks:
            raise RegistrationRefused(
                f"the scheduler counts {saves.buffer_blocks} blocks in the host buffer and this "
                f"worker has room for {self.pool.host_blocks}: all ranks need tensors of one size",
                "set KVPATCH_HOST_BUFFER_BYTES alike in every process of this engine",
            )
        started = perf_counter()
        if saves.blocks:
            self.pool.save(saves.blocks, saves.host_blocks)
        if saves.is_last:
            self.pool.settle()
        self.saved_blocks += len(saves.blocks)
        self.save_seconds += perf_counter() - started
        self.book.show(SAVED_BLOCKS, self.saved_blocks)
        self.book.show(SAVE_SECONDS, self.save_seconds)


def make(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> Mapping[str, Any]:
    """Makes the buffer of a worker's caches, another one each time; returns its tensors, by layer.

    Raises:
        RegistrationRefused: a cache that is not attention in blocks.
        UnexpectedCaches: a device without storages that does not copy what it is told to.
    """
    # Recurrent state is a list of tensors <= 0.26.
    _refuse(name for name, cache in kv_caches.items() if isinstance(cache, list | tuple))
    is_storageless = not all(map(has_storage, kv_caches.values()))
    tensors = {n: shown(c) for n, c in kv_caches.items()} if is_storageless else dict(kv_caches)
    layers = read_layers(release, tensors)
    _refuse(kv_caches.keys() - layers.keys())
    block_tokens = {plane.counts.block_tokens for c in layers.values() for plane in c.planes}
    parts = release.planned_kernel_blocks
    if parts is None:  # these releases find out while they register
        parts = int(release.worker.block_size) // min(block_tokens)
    dimensions = {name: c.order.dimensions.index("block") for name, c in layers.items()}
    blocks = release.planned_blocks
    if blocks is None or not is_as_planned(layers, blocks, parts):
        blocks = min(cache.blocks for cache in layers.values()) // parts
    size = block_bytes(kv_caches, dimensions, blocks)
    host_blocks = host_blocks_in(settings.host_buffer_bytes(), size, blocks)
    by_kvcached = settings.is_kvcached_enabled()
    pages = None
    if by_kvcached:
        check_pools(kv_caches, layers)
        pages = pages_behind(kv_caches, layers)
    pool = HostPool(kv_caches, dimensions, blocks, host_blocks, is_there_late=by_kvcached)
    _LOG.info(
        "host buffer of %d bytes for %d blocks of %d bytes; vLLM's own would take %d bytes",
        pool.size_bytes,
        host_blocks,
        size,
        mirror_bytes(kv_caches),
    )
    caches = None
    if is_storageless:
        tensors = {name: shown(cache, dimensions[name]) for name, cache in kv_caches.items()}
        caches = StoragelessCaches(kv_caches, tensors, dimensions)
        try:  # a block onto the device, as the pool has copied one from it
            wrong = caches.find_wrong()
        except CANNOT as error:
            raise UnexpectedCaches(
                f"KV caches without a storage cannot be written: {error}"
            ) from error
        if wrong:
            raise UnexpectedCaches(
                f"a block of {', '.join(wrong)}, which have no storage, is not itself after it was "
                "copied to the device"
            )
        # The pool has the layout of its shapes, whatever the device was asked for.
        state_layout_of_strides(release, read_layers(release, pool.tensors))
    state = worker_state(release.worker)
    state.hold(HostBuffer(pool, state.book))
    state.hold(DeviceCaches(tensors, caches))
    if pages is None:
        state.drop(MappedPages)
    else:
        state.hold(pages)
    return pool.tensors


def _refuse(layers: Iterable[str]) -> None:
    names = sorted(layers)
    if names:
        raise RegistrationRefused(
            f"{', '.join(names)}: no cache of attention layers in blocks, which alone go through "
            "a host buffer",
            "use KVPATCH_HOST_BUFFER=never",
        )


@contextmanager
def taken_for_host_memory(vllm_config: Any, facts: ReleaseFacts) -> Iterator[None]:
    """Lets a worker be made for this device, while inside, whatever the release knows of it."""
    from vllm.platforms import current_platform

    supported = supported_devices(facts)
    if supported is None:  # 0.10.0 does not ask
        yield
        return
    transfer = vllm_config.kv_transfer_config
    device, asked = current_platform.device_type, transfer.kv_buffer_device
    known = supported.get(device)
    supported[device] = ("cpu",)
    transfer.kv_buffer_device = "cpu"
    try:
        yield
    finally:
        transfer.kv_buffer_device = asked
        if known is None:
            del supported[device]
        else:
            supported[device] = known


def become_plain(release: ReleaseWorker) -> None:
    """Makes a new worker register the tensors that it is handed as host memory."""
    worker = release.worker
    worker.nixl_memory_type = "DRAM"
    if not release.facts.has_host_buffer:
        worker.nixl_wrapper = HostMemoryAgent(worker.nixl_wrapper)
        return
    worker.use_host_buffer = False
    if worker.device_type != "cpu":
        worker.kv_buffer_device = worker.device_type
    # Any other than a TPU's tensors are shaped like CUDA's.
    if release.facts.checks_device_again and worker.device_type != "tpu":
        worker.device_type = "cuda"


class HostMemoryAgent(ObjectProxy):
    """A NIXL agent of 0.10.0, which calls all memory VRAM and asks tensors for their device."""

    def get_reg_descs(self, descs: Any, mem_type: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(descs, list):
            descs = [(address, length, 0, tag) for address, length, _, tag in descs]
        return self.__wrapped__.get_reg_descs(descs, "DRAM", *args, **kwargs)

    def get_xfer_descs(self, descs: Any, mem_type: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(descs, list):
            descs = [(address, length, 0) for address, length, _ in descs]
        else:
            descs = descs.copy()
            descs[:, 2] = 0
        return self.__wrapped__.get_xfer_descs(descs, "DRAM", *args, **kwargs)
