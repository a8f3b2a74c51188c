"""kvcached's allocation from vLLM 0.29 on: raw memory that the release's own code views.

kvcached's real ``model_runner_v2`` reserves a pool (or one for each layer of a group) and has
the release's real ``create_kv_cache_views`` lay out the plan that the release's real planner
made. STAND-IN: the compiled part, as in :mod:`kvcached_standin`.

0.1.6 starts on 0.29 and 0.30 alone; on later releases this is its code for 0.30 over their
views, which no kvcached runs.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from . import kvcached_standin as standin
from .kvcached_standin import Reservation

_MODULE = "kvcached.integration.vllm.model_runner_v2"
#: Of kvcached's real pages, whose sizes the lab's go up to.
_MOST_PAGE_BYTES = 2 * 1024**2


@dataclass(frozen=True)
class Planned:
    """What kvcached handed out: every layer's tensor, and the memory behind them."""

    tensors: Mapping[str, torch.Tensor]
    reservations: tuple[Reservation, ...]


def allocate(
    plan: Any,
    layout: str,
    kernel_block_tokens: Sequence[int],
    *,
    contiguous: bool,
    virtual_blocks: int,
    page_bytes: int = standin.PAGE_BYTES,
) -> Planned:
    """Has kvcached allocate a plan; nothing of it can be accessed yet.

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

    interfaces = standin.interfaces()
    theirs = importlib.import_module(_MODULE)
    theirs.CONTIGUOUS_LAYOUT = standin.compiled().contiguous = contiguous
    interfaces._kvcached_initialized = True
    theirs.PAGE_SIZE, geometry = _page_and_geometry(theirs, plan, page_bytes)
    standin.use_pages(theirs.PAGE_SIZE)
    pages = -(-virtual_blocks * geometry.page_bytes // theirs.PAGE_SIZE)
    memory_bytes = pages * theirs.PAGE_SIZE * geometry.num_pools
    device = types.SimpleNamespace(total_memory=memory_bytes)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda _: device):
        tensors = theirs.allocate_kv_cache(
            plan, "cuda:0", KVCacheLayout[layout], list(kernel_block_tokens)
        )
    return Planned(tensors, tuple(standin.compiled().reservations))


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
