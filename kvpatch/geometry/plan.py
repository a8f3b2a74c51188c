"""Turns segments of tokens into runs of bytes between two sets of planes.

All arrays: a segment costs a few array operations together with all others of its
length, and layers that are strided alike are planned once and shifted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvpatch.geometry.errors import UnplannableCopy
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.segments import Int64Array, Segments


@dataclass(frozen=True)
class Plan:
    """Byte runs to copy and byte runs to zero.

    No byte is written twice, provided that no two local planes share memory: layers that
    share a tensor have blocks of their own, so a plan each. Runs that touch on both
    sides are one, except across two layers, or across the keys and values of one where
    these lie further apart than blocks do: such neighbours can belong to two
    registrations.

    Attributes:
        remote_address: where each run is read.
        local_address: where it is written.
        length: its bytes.
        zero_address: where each run of zeros is written.
        zero_length: its bytes.
    """

    remote_address: Int64Array
    local_address: Int64Array
    length: Int64Array
    zero_address: Int64Array
    zero_length: Int64Array

    def __len__(self) -> int:
        return int(self.length.size)

    @property
    def copied_bytes(self) -> int:
        """Bytes that the copy moves."""
        return int(self.length.sum())


def plan_copy(
    segments: Segments,
    remote_planes: Sequence[Plane],
    local_planes: Sequence[Plane],
    tail: Segments | None = None,
    partial_heads: bool = False,
) -> Plan:
    """The runs that bring the segments' tokens of every local plane from the remote ones.

    Planes meet by layer, content and global head, so any two tensor-parallel ranks do;
    a head that several remote planes hold is read from the first.

    Args:
        remote_planes: of one address space, so of one rank.
        tail: what to zero in the local planes (:func:`uncovered_tail`).
        partial_heads: take what the remote planes hold and leave the other heads alone,
            for one of several remote ranks; :func:`missing_heads` over all of them says
            whether they suffice.

    Raises:
        UnplannableCopy: a layer or head is missing, contents differ in width or item
            size, or a segment reaches outside a plane.
    """
    if not partial_heads:
        missing = missing_heads(remote_planes, local_planes)
        if missing:
            layer, content, head = missing[0]
            raise UnplannableCopy(
                f"expected a remote {content.value} plane of layer {layer!r} with head {head}, "
                f"found none, nor {len(missing) - 1} more such heads"
            )
    copies = _runs(segments, _copies(remote_planes, local_planes))
    zeros = _NO_RUNS if tail is None else _runs(tail, _copies(local_planes, local_planes))
    return Plan(*copies, zero_address=zeros.local, zero_length=zeros.length)


def missing_heads(
    remote_planes: Sequence[Plane], local_planes: Sequence[Plane]
) -> tuple[tuple[str, Content, int], ...]:
    """(layer, content, global head) of local planes that no remote plane holds."""
    held = _by_content(remote_planes)
    return tuple(
        (local.layer, local.content, head)
        for local in local_planes
        for start, end, remote in _head_ranges(local, held[local.layer, local.content])
        if remote is None
        for head in range(start, end)
    )


class _Axis(NamedTuple):
    """``size`` steps of so many bytes on each side."""

    size: int
    remote_stride: int
    local_stride: int


class _Runs(NamedTuple):
    remote: Int64Array
    local: Int64Array
    length: Int64Array


_NO_RUNS = _Runs(*(np.empty(0, dtype=np.int64) for _ in range(3)))


class _Strides(NamedTuple):
    """How a copy is strided on both sides, without saying where: what layers share.

    ``block`` and ``token`` are stepped by segments; ``inner`` (heads, channels, and keys
    and values where they are copied together) is walked whole.
    """

    item_bytes: int
    block: _Axis
    token: _Axis
    inner: tuple[_Axis, ...]


@dataclass(frozen=True)
class _Copy:
    """From one remote to one local plane, or a pair of them, within a range of heads."""

    remote: Plane
    local: Plane
    remote_address: int
    local_address: int
    strides: _Strides


def _by_content(planes: Sequence[Plane]) -> defaultdict[tuple[str, Content], list[Plane]]:
    found: defaultdict[tuple[str, Content], list[Plane]] = defaultdict(list)
    for plane in planes:
        found[plane.layer, plane.content].append(plane)
    return found


def _head_ranges(
    local: Plane, candidates: Sequence[Plane]
) -> Iterator[tuple[int, int, Plane | None]]:
    """The local plane's heads in order as (start, end, the remote plane that holds them)."""
    head = local.first_head
    while head < local.end_head:
        holder = next(
            (plane for plane in candidates if plane.first_head <= head < plane.end_head), None
        )
        if holder is None:
            later = [plane.first_head for plane in candidates if plane.first_head > head]
            end = min([local.end_head, *later])
        else:
            end = min(local.end_head, holder.end_head)
        yield head, end, holder
        head = end


def _copies(remote_planes: Sequence[Plane], local_planes: Sequence[Plane]) -> list[_Copy]:
    """Every meeting of two planes; keys and values of one layer as one where they can be."""
    held = _by_content(remote_planes)
    copies: list[_Copy] = []
    for local in local_planes:
        for start, end, remote in _head_ranges(local, held[local.layer, local.content]):
            if remote is None:
                continue
            copy = _copy(remote, local, start, end)
            fused = _fused(copies[-1], copy) if copies else None
            if fused is not None:
                copies[-1] = fused
            else:
                copies.append(copy)
    return copies


def _copy(remote: Plane, local: Plane, start_head: int, end_head: int) -> _Copy:
    if remote.item_bytes != local.item_bytes or remote.counts.channels != local.counts.channels:
        raise UnplannableCopy(
            f"expected planes of one width and item size, found {remote} and {local}"
        )
    theirs, ours = remote.strides_bytes, local.strides_bytes
    return _Copy(
        remote,
        local,
        remote.address + (start_head - remote.first_head) * theirs.head,
        local.address + (start_head - local.first_head) * ours.head,
        _Strides(
            item_bytes=local.item_bytes,
            block=_Axis(local.counts.blocks, theirs.block, ours.block),
            token=_Axis(local.counts.block_tokens, theirs.token, ours.token),
            inner=(
                _Axis(local.counts.channels, theirs.channel, ours.channel),
                _Axis(end_head - start_head, theirs.head, ours.head),
            ),
        ),
    )


def _fused(keys: _Copy, values: _Copy) -> _Copy | None:
    """Both as one copy where they lie alike on each side; None where they do not.

    Without this, packed caches of one layout would be copied a row at a time. Values
    before their keys are left apart: walked in turns, a block's values and the next
    block's keys could merge into a run across two registrations.
    """
    pair = (keys.local.content, values.local.content)
    if pair != (Content.KEY, Content.VALUE) or keys.local.layer != values.local.layer:
        return None
    ours, theirs = keys.strides, values.strides
    apart = (
        values.remote_address - keys.remote_address,
        values.local_address - keys.local_address,
    )
    if min(apart) <= 0 or ours._replace(inner=()) != theirs._replace(inner=()):
        return None
    if keys.remote.counts[::2] != values.remote.counts[::2] or len(ours.inner) > 2:
        return None  # unlike blocks or block_tokens: each needs a check of its own
    (channel, head), (value_channel, value_head) = ours.inner, theirs.inner
    if head != value_head or channel[1:] != value_channel[1:]:
        return None
    item = ours.item_bytes
    row = channel.size * item
    if apart == (row, row) and channel[1:] == (item, item):
        wide = channel._replace(size=channel.size + value_channel.size)
        return replace(keys, strides=ours._replace(inner=(wide, head)))
    if channel.size != value_channel.size:
        return None
    return replace(keys, strides=ours._replace(inner=(channel, head, _Axis(2, *apart))))


def _runs(segments: Segments, copies: Sequence[_Copy]) -> _Runs:
    """The runs of all copies, one after the other."""
    if not len(segments) or not copies:
        return _NO_RUNS
    alike: defaultdict[_Strides, list[_Copy]] = defaultdict(list)
    reach = _reach(segments)
    for copy in copies:
        _check_reach(reach, copy)
        alike[copy.strides].append(copy)
    parts = [_shifted(segments, strides, group) for strides, group in alike.items()]
    if len(parts) == 1:
        return parts[0]
    return _Runs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _shifted(segments: Segments, strides: _Strides, copies: Sequence[_Copy]) -> _Runs:
    """Runs of copies that are strided alike: planned once, shifted to each address."""
    outside, inside = _outside_blocks(strides)
    runs = _merged(_relative_runs(segments, strides, inside))
    shift = _offsets(outside)
    remote = _add(np.array([copy.remote_address for copy in copies], dtype=np.int64), shift.remote)
    local = _add(np.array([copy.local_address for copy in copies], dtype=np.int64), shift.local)
    return _Runs(
        _add(remote, runs.remote),
        _add(local, runs.local),
        np.tile(runs.length, remote.size),
    )


def _outside_blocks(strides: _Strides) -> tuple[list[_Axis], list[_Axis]]:
    """Inner axes that step over blocks here (heads of LHBNC, far values), and the rest.

    The former are walked outside the segments, so that neighbouring blocks are
    neighbours in the list of runs and merge.
    """
    outside: list[_Axis] = []
    inside: list[_Axis] = []
    for axis in strides.inner:
        steps_over = strides.block.size > 1 and axis.local_stride > strides.block.local_stride
        (outside if steps_over else inside).append(axis)
    return outside, inside


def _relative_runs(segments: Segments, strides: _Strides, inside: Sequence[_Axis]) -> _Runs:
    """Runs of every segment, in the order of the segments, from address 0 on each side."""
    remote = (
        segments.remote_block * strides.block.remote_stride
        + segments.remote_offset * strides.token.remote_stride
    )
    local = (
        segments.local_block * strides.block.local_stride
        + segments.local_offset * strides.token.local_stride
    )
    lengths, kind = np.unique(segments.tokens, return_inverse=True)
    runs = [
        _segment_runs(strides.item_bytes, [*inside, strides.token._replace(size=int(tokens))])
        for tokens in lengths
    ]
    if len(runs) == 1:
        (own,) = runs
        return _Runs(
            _add(remote, own.remote), _add(local, own.local), np.tile(own.length, remote.size)
        )
    count = np.array([own.length.size for own in runs], dtype=np.int64)[kind]
    end = np.cumsum(count)
    begin = end - count
    result = _Runs(*(np.empty(int(end[-1]), dtype=np.int64) for _ in range(3)))
    for number, own in enumerate(runs):
        chosen = np.flatnonzero(kind == number)
        place = _add(begin[chosen], np.arange(own.length.size, dtype=np.int64))
        result.remote[place] = _add(remote[chosen], own.remote)
        result.local[place] = _add(local[chosen], own.local)
        result.length[place] = np.tile(own.length, chosen.size)
    return result


def _segment_runs(item_bytes: int, axes: Sequence[_Axis]) -> _Runs:
    """Runs of one segment: as long as both sides are contiguous, then one per step."""
    length = item_bytes
    left = [axis for axis in axes if axis.size > 1]
    while True:
        grown = next((axis for axis in left if axis[1:] == (length, length)), None)
        if grown is None:
            break
        length *= grown.size
        left.remove(grown)
    steps = _offsets(left)
    return _Runs(steps.remote, steps.local, np.full(steps.remote.size, length, dtype=np.int64))


def _offsets(axes: Sequence[_Axis]) -> _Runs:
    """Byte offsets of every step of the axes, ascending on the local side; no lengths."""
    remote = local = np.zeros(1, dtype=np.int64)
    for axis in sorted(axes, key=lambda axis: -axis.local_stride):
        step = np.arange(axis.size, dtype=np.int64)
        remote = _add(remote, step * axis.remote_stride)
        local = _add(local, step * axis.local_stride)
    return _Runs(remote, local, np.empty(0, dtype=np.int64))


def _add(outer: Int64Array, inner: Int64Array) -> Int64Array:
    """Every sum of the two, the second running faster."""
    return (outer[:, None] + inner).reshape(-1)


def _merged(runs: _Runs) -> _Runs:
    """Neighbours in the list that touch on both sides, as one run."""
    remote, local, length = runs
    starts = np.empty(length.size, dtype=np.bool_)
    starts[0] = True
    ahead = length[:-1]
    np.not_equal(local[:-1] + ahead, local[1:], out=starts[1:])
    starts[1:] |= remote[:-1] + ahead != remote[1:]
    first = np.flatnonzero(starts)
    if first.size == length.size:
        return runs
    return _Runs(remote[first], local[first], np.add.reduceat(length, first))


class _Reach(NamedTuple):
    """How far segments go on one side: past the last block, past the last token of a block."""

    side: str
    lowest: int
    end_block: int
    end_token: int


def _reach(segments: Segments) -> tuple[_Reach, _Reach]:
    if int(segments.tokens.min()) < 1:
        raise UnplannableCopy(
            f"expected segments of 1 token or more, found {int(segments.tokens.min())}"
        )
    sides = (
        ("remote", segments.remote_block, segments.remote_offset),
        ("local", segments.local_block, segments.local_offset),
    )
    theirs, ours = (
        _Reach(
            side,
            min(int(block.min()), int(offset.min())),
            int(block.max()) + 1,
            int((offset + segments.tokens).max()),
        )
        for side, block, offset in sides
    )
    return theirs, ours


def _check_reach(reach: tuple[_Reach, _Reach], copy: _Copy) -> None:
    for side, plane in zip(reach, (copy.remote, copy.local), strict=True):
        if (
            side.lowest < 0
            or side.end_block > plane.counts.blocks
            or side.end_token > plane.counts.block_tokens
        ):
            raise UnplannableCopy(
                f"expected {side.side} segments inside {plane}, found blocks up to "
                f"{side.end_block - 1}, tokens up to {side.end_token - 1} in a block, "
                f"and {side.lowest} as the lowest number"
            )
