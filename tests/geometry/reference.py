"""The slow way: one element at a time, in plain Python, nothing shared with the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from kvpatch.geometry.direct_plan import Plan
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList


def positions(plane: Plane) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every (block, head, token, channel) of a plane with its address."""
    for place in product(*map(range, plane.counts)):
        yield place, plane.address + byte_offset(plane, *place)


def byte_offset(plane: Plane, block: int, head: int, token: int, channel: int) -> int:
    """Bytes from a plane's address to an item; ``head`` counts from the plane's own first."""
    strides, tile = plane.strides_bytes, plane.tile
    found = block * strides.block + head * strides.head
    if tile is None:
        return found + token * strides.token + channel * strides.channel
    return (
        found
        + token // tile.tokens * strides.token
        + token % tile.tokens * tile.token_step
        + channel // tile.channels * strides.channel
        + channel % tile.channels * tile.channel_step
    )


def token_place(blocks: BlockList, token: int) -> tuple[int, int]:
    """Block id and offset of one token position."""
    behind = token - blocks.first_token
    return int(blocks.block_ids[behind // blocks.block_tokens]), behind % blocks.block_tokens


def _item(plane: Plane, blocks: BlockList, address: int, token: int, head: int, at: int) -> slice:
    """The bytes of a channel of one of the model's heads, in memory from an address on."""
    block, offset = token_place(blocks, token)
    start = plane.address - address
    start += byte_offset(plane, block, head - plane.first_head, offset, at)
    return slice(start, start + plane.item_bytes)


def slow_copy(
    source: bytes,
    source_address: int,
    target: bytearray,
    target_address: int,
    remote_planes: Sequence[Plane],
    local_planes: Sequence[Plane],
    remote: BlockList,
    local: BlockList,
    tokens: range,
) -> None:
    """What a plan has to do, item by item."""
    for ours, theirs in product(local_planes, remote_planes):
        if (ours.layer, ours.content) != (theirs.layer, theirs.content):
            continue
        first, end = max(ours.first_head, theirs.first_head), min(ours.end_head, theirs.end_head)
        for place in product(tokens, range(first, end), range(ours.counts.channels)):
            there = _item(theirs, remote, source_address, *place)
            target[_item(ours, local, target_address, *place)] = source[there]


def slow_zero(
    target: bytearray, target_address: int, planes: Sequence[Plane], local: BlockList, first: int
) -> None:
    """Zeroes every token of the local blocks from ``first`` on."""
    for plane in planes:
        heads, channels = range(plane.first_head, plane.end_head), range(plane.counts.channels)
        for place in product(range(first, local.end_token), heads, channels):
            target[_item(plane, local, target_address, *place)] = bytes(plane.item_bytes)


def execute(
    plan: Plan,
    source: bytes,
    source_address: int,
    target: bytearray,
    target_address: int,
    written: set[int] | None = None,
) -> None:
    """Does a plan's runs; a run outside either side, or written twice, is an error.

    Args:
        written: by other plans; the plan's runs are added.
    """
    written = set() if written is None else written
    columns = plan.remote_address - source_address, plan.local_address - target_address, plan.length
    for start, place, length in zip(*(column.tolist() for column in columns), strict=True):
        assert length > 0
        assert start >= 0 and start + length <= len(source)
        assert place >= 0 and place + length <= len(target)
        run = range(place, place + length)
        assert written.isdisjoint(run)
        written.update(run)
        target[place : place + length] = source[start : start + length]
