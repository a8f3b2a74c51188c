"""The slow way: one element at a time, in plain Python, nothing shared with the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList

from .planned import CopyAndZeros


def positions(plane: Plane) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """Every (block, head, token, channel) of a plane with its address."""
    strides = plane.strides_bytes
    for block in range(plane.counts.blocks):
        for head in range(plane.counts.heads):
            for token in range(plane.counts.block_tokens):
                for channel in range(plane.counts.channels):
                    yield (
                        (block, head, token, channel),
                        plane.address
                        + block * strides.block
                        + head * strides.head
                        + token * strides.token
                        + channel * strides.channel,
                    )


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
    for ours in local_planes:
        for theirs in remote_planes:
            if (ours.layer, ours.content) != (theirs.layer, theirs.content):
                continue
            for head in range(
                max(ours.first_head, theirs.first_head), min(ours.end_head, theirs.end_head)
            ):
                for token in tokens:
                    remote_block, remote_offset = token_place(remote, token)
                    local_block, local_offset = token_place(local, token)
                    for channel in range(ours.counts.channels):
                        start = (
                            theirs.address
                            - source_address
                            + byte_offset(
                                theirs,
                                remote_block,
                                head - theirs.first_head,
                                remote_offset,
                                channel,
                            )
                        )
                        place = (
                            ours.address
                            - target_address
                            + byte_offset(
                                ours, local_block, head - ours.first_head, local_offset, channel
                            )
                        )
                        item = ours.item_bytes
                        target[place : place + item] = source[start : start + item]


def slow_zero(
    target: bytearray, target_address: int, planes: Sequence[Plane], local: BlockList, first: int
) -> None:
    """Zeroes every token of the local blocks from ``first`` on."""
    for plane in planes:
        for token in range(first, local.end_token):
            block, offset = token_place(local, token)
            for head in range(plane.counts.heads):
                for channel in range(plane.counts.channels):
                    place = plane.address - target_address
                    place += byte_offset(plane, block, head, offset, channel)
                    target[place : place + plane.item_bytes] = bytes(plane.item_bytes)


def execute(
    plan: CopyAndZeros, source: bytes, source_address: int, target: bytearray, target_address: int
) -> None:
    """Does a plan's runs; a run outside either side, or written twice, is an error."""
    written: set[int] = set()
    for remote, address, length in zip(
        plan.remote_address.tolist(), plan.local_address.tolist(), plan.length.tolist(), strict=True
    ):
        start, place = remote - source_address, address - target_address
        assert length > 0
        assert start >= 0 and start + length <= len(source)
        assert place >= 0 and place + length <= len(target)
        run = range(place, place + length)
        assert written.isdisjoint(run)
        written.update(run)
        target[place : place + length] = source[start : start + length]
    for address, length in zip(plan.zero_address.tolist(), plan.zero_length.tolist(), strict=True):
        place = address - target_address
        assert length > 0
        assert place >= 0 and place + length <= len(target)
        run = range(place, place + length)
        assert written.isdisjoint(run)
        written.update(run)
        target[place : place + length] = bytes(length)
