"""A worker's reader of one peer, between two caches of planes, without the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpatch.core.proxies import replaced
from kvpatch.core.releases import FACTS
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Plane
from kvpatch.load.heterogeneous_reads import HeterogeneousReads
from kvpatch.load.read_request import ReadRequest
from kvpatch.load.reader import Destination, Reader, RequestContext
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.remote_ranks import Peer, RemoteRank
from kvpatch.transfer.own_read import OwnRead
from kvpatch.transfer.progress_thread import ProgressThread
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import BLOCKS_FIRST

_P = "P"


def _by_layer(planes: Sequence[Plane]) -> dict[str, tuple[Plane, ...]]:
    found: dict[str, tuple[Plane, ...]] = {}
    for plane in planes:
        found[plane.layer] = (*found.get(plane.layer, ()), plane)
    return found


def _local_geometry(planes: Sequence[Plane]) -> LocalGeometry:
    layers = _by_layer(planes)
    first = planes[0]
    return LocalGeometry(
        layers={name: LayerCache(BLOCKS_FIRST, of) for name, of in layers.items()},
        addresses=tuple(of[0].address for of in layers.values()),
        block_bytes=(first.strides_bytes.block,) * len(layers),
        block_tokens=first.counts.block_tokens,
        kernel_blocks_per_block=1,
        layout="HND",
        inner_layout="HND",
        total_heads=first.counts.heads,
        tp_rank=0,
        tp_size=1,
        memory=first.memory,
        backend="FLASH_ATTN",
        key_order=KeyOrder.ROW_MAJOR,
        facts=FACTS["0.33.0"],
    )


def _rank(planes: Sequence[Plane], ours: Sequence[Plane], agent: str) -> RemoteRank:
    layers = _by_layer(planes)
    first = planes[0]
    metadata = AgentMetadata(
        engine_id=_P,
        tp_rank=0,
        tp_size=1,
        block_tokens=first.counts.block_tokens,
        kernel_blocks_per_block=1,
        layout="HND",
        blocks=first.counts.blocks,
        addresses=tuple(of[0].address for of in layers.values()),
        block_bytes=(first.strides_bytes.block,) * len(layers),
        stride_bytes=(first.strides_bytes.block,) * len(layers),
        backend="FLASH_ATTN",
        device_id=0,
        memory_kinds=("DRAM",),
    )
    regions = tuple(map(tuple, layers.values()))
    return RemoteRank(metadata, regions, overlaps_of(regions, ours), agent)


def preparing(
    theirs: Sequence[Plane],
    ours: Sequence[Plane],
    memory: torch.Tensor,
    pool: StagingPool,
    nixl: Any,
    thread: ProgressThread,
    agent: str,
) -> Callable[[Sequence[int], Sequence[int], int], OwnRead]:
    """(local blocks, remote blocks, tokens) -> a staged read, as in the step that loads it.

    Args:
        memory: that all of our planes lie in.
        nixl: the agent of the thread.
        agent: NIXL's name of the peer.
    """
    names = list(_by_layer(ours))
    reader = Reader(
        _local_geometry(ours),
        (Group(frozenset(names), window_tokens=0),),
        Destination(dict.fromkeys(names, memory), memory.device),
        "staged",
    )
    reads = HeterogeneousReads(reader, nixl, pool, thread)
    reader.peers[_P] = peer = Peer({0: _rank(theirs, ours, agent)})

    def prepare(local: Sequence[int], remote: Sequence[int], tokens: int) -> OwnRead:
        request = ReadRequest(tokens, tokens, (tuple(local),), (tuple(remote),), waited=0.0)
        context = RequestContext("request", _P, request, peer)
        with replaced(reader, context=context):
            return reads.prepare(None, context, [0], b"read")

    return prepare
