"""kvcached in a real engine on a CPU: its own view code, over stand-ins for what needs CUDA.

STAND-INS: the memory is host memory of which only some pages can be accessed (see
``tests/lab/kvcached_standin.py``), and pages come and go with the blocks of vLLM's own pool
instead of kvcached's: a page is there while a block in it is in use, or is one of the last that
were freed with a prefix worth keeping. Every other page can be neither read nor written, so that
an engine that touches one ends. Real are vLLM 0.32, the connector, NIXL, and kvcached's
``allocate_kv_cache``, which 0.1.6 has for vLLM 0.29 and 0.30 and which runs unchanged on 0.32.

vLLM finds this by its entry point in every process; ``ENABLE_KVCACHED=true`` turns it on.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import wrapt

from tests.lab import kvcached_standin as standin

#: Blocks with a prefix that stay when nobody uses them; the next ones shrink the cache.
_KEPT_BLOCKS = 24
#: A multiple of every block of the engines here, and far less than kvcached's 2 MiB.
_PAGE_BYTES = 128 * 1024
#: How much more virtual memory there is than the cache was planned with.
_OVERCOMMIT = 2


def register() -> None:
    if os.environ.get("ENABLE_KVCACHED") != "true":
        return
    elastic = Elastic()
    wrapt.when_imported("vllm.v1.worker.gpu_model_runner")(elastic.patch_runner)
    wrapt.when_imported("vllm.v1.worker.gpu_worker")(elastic.patch_worker)
    wrapt.when_imported("vllm.v1.core.block_pool")(elastic.patch_pool)


class Elastic:
    """The cache of the engine in this process, and which of its pages are there."""

    def __init__(self) -> None:
        self._spans: Callable[[int], Iterable[tuple[int, int]]] = lambda block: ()
        self._reservations: list[standin.Reservation] = []
        self._held: set[int] = set()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._holders: Counter[tuple[int, int]] = Counter()
        self._grown = self._shrunk = 0

    # --- where kvcached's own code comes in ----------------------------------------

    def patch_runner(self, module: Any) -> None:
        module.allocate_kv_cache = self._allocate

    def patch_worker(self, module: Any) -> None:
        """Its filter of layouts: blocks outermost where the cache is contiguous."""
        standin.interfaces()  # puts kvcached's source in reach
        name = "kvcached.integration.vllm.model_runner_v2"
        importlib.import_module(name).KVLayoutV2Patch().apply(module)

    def _allocate(
        self, config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None
    ) -> Mapping[str, torch.Tensor]:
        found = standin.allocate_planned(
            config,
            layout.name,
            kernel_block_sizes or [],
            contiguous=os.environ["KVCACHED_CONTIGUOUS_LAYOUT"] == "true",
            virtual_blocks=_OVERCOMMIT * config.num_blocks,
            page_bytes=_PAGE_BYTES,
        )
        self._reservations = list(found.reservations)
        views = tuple(found.tensors.values())
        self._spans = lambda block: [_span(view[block]) for view in views]
        self._hold([0])  # vLLM's null block, which steps without requests write to
        return found.tensors

    # --- pages come and go ---------------------------------------------------------

    def patch_pool(self, module: Any) -> None:
        pool = module.BlockPool
        wrapt.wrap_function_wrapper(pool, "get_new_blocks", self._take)
        wrapt.wrap_function_wrapper(pool, "touch", self._touch)
        wrapt.wrap_function_wrapper(pool, "free_blocks", self._free)
        wrapt.wrap_function_wrapper(pool, "reset_prefix_cache", self._forget)

    def _take(self, wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        taken = wrapped(*args, **kwargs)
        for block in taken:
            self._kept.pop(block.block_id, None)
        self._hold(block.block_id for block in taken)
        return taken

    def _touch(self, wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        for block in args[0]:
            self._kept.pop(block.block_id, None)
        return wrapped(*args, **kwargs)

    def _free(self, wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        blocks = list(args[0])
        result = wrapped(blocks)
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                if block.block_hash is None:
                    self._release([block.block_id])
                else:
                    self._kept[block.block_id] = block
        while len(self._kept) > _KEPT_BLOCKS:
            number, block = self._kept.popitem(last=False)
            pool._maybe_evict_cached_block(block)
            self._release([number])
        self._tell()
        return result

    def _forget(self, wrapped: Any, pool: Any, args: Any, kwargs: Any) -> Any:
        done = wrapped(*args, **kwargs)
        if done:
            self._release(self._kept)
            self._kept.clear()
        return done

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self._held:
                self._held.add(block)
                for place in self._pages(block):
                    self._holders[place] += 1
                    if self._holders[place] == 1:
                        self._reservations[place[0]].map(place[1])
                        self._grown += 1

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._held.remove(block)
            for place in self._pages(block):
                self._holders[place] -= 1
                if not self._holders[place]:
                    self._reservations[place[0]].unmap(place[1])
                    self._shrunk += 1

    def _pages(self, block: int) -> set[tuple[int, int]]:
        found = set()
        for span in self._spans(block):
            for number, reservation in enumerate(self._reservations):
                if reservation.address <= span[0] < reservation.address + reservation.size_bytes:
                    found |= {(number, page) for page in reservation.pages_of([span])}
        return found

    def _tell(self) -> None:
        there = sum(len(reservation.mapped) for reservation in self._reservations)
        standin.interfaces().logger.info(
            "stand-in: %d pages are there, %d came and %d went", there, self._grown, self._shrunk
        )


def _span(view: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) from the first to past the last element."""
    axes = zip(view.shape, view.stride(), strict=True)
    items = 1 + sum((size - 1) * stride for size, stride in axes)
    return view.data_ptr(), items * view.element_size()
