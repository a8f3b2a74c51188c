"""What this engine has computed of a prompt, and what a peer's blocks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.segments import kernel_blocks
from kvpatch.geometry.staged_plan import Chunk, Placement
from kvpatch.transfer.caches import done
from kvpatch.transfer.plane_bytes import Tails, first_tokens
from kvpatch.transfer.storageless import StoragelessCaches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from kvpatch.connector.handshake.remote_ranks import RemoteRank
    from kvpatch.connector.local.kv_cache_groups import Group
    from kvpatch.connector.local.local_geometry import LocalGeometry
    from kvpatch.connector.local.registered_caches import LayerCache
    from kvpatch.connector.read_request import LocallyComputed, ReadRequest

Bytes = npt.NDArray[np.uint8]

#: What is looked at of a prompt, in the first layer of a group and in the last.
_SAMPLED_TOKENS = 1024


@dataclass(frozen=True)
class Sample:
    """Some tokens of a prompt as we have computed them.

    Attributes:
        tokens: which; none where the engine has computed none that a peer would name.
        values: [token, head, channel, byte] of each sampled layer and content.
    """

    tokens: range
    values: Mapping[tuple[str, Content], Bytes]


NOTHING = Sample(range(0), {})


def sampled_planes_of(
    ours: LocalGeometry,
    groups: Sequence[Group],
    layers: Mapping[str, LayerCache],
    tensors: Mapping[str, torch.Tensor],
    storageless: StoragelessCaches | None,
) -> SampledPlanes | None:
    """What is compared with peers; None where there is no attention.

    Args:
        layers: of our own cache, in `tensors`.
    """
    found = [(n, group) for n, group in enumerate(groups) if not group.has_state]
    # Full attention first, then the largest window.
    found.sort(key=lambda one: (bool(one[1].window_tokens), -one[1].window_tokens))
    for number, group in found:
        names = [name for name in layers if name in group.layers]
        if names:
            chosen = dict.fromkeys((names[0], names[-1]))
            planes = tuple(plane for name in chosen for plane in layers[name].planes)
            return SampledPlanes(ours, planes, tensors, group, number, storageless)
    return None


@dataclass(frozen=True)
class SampledPlanes:
    """Which of our planes are compared with a peer's, and how they are looked at.

    Attributes:
        planes: of the group's first layer and of its last.
        group: whose blocks are looked at: the first that looks at all tokens, if any does.
        number: of the group.
    """

    ours: LocalGeometry
    planes: tuple[Plane, ...]
    tensors: Mapping[str, torch.Tensor]
    group: Group
    number: int
    storageless: StoragelessCaches | None = None

    def take(self, request: ReadRequest, computed: LocallyComputed) -> Sample:
        """What the engine holds of a prompt by now; waits for the device.

        Raises:
            RuntimeError: torch cannot index or copy these tensors.
        """
        block_tokens = self.planes[0].counts.block_tokens
        tokens = self.range_of(request, computed)
        first, end = tokens.start, tokens.stop
        if self.number >= len(computed.blocks):
            return NOTHING
        table = kernel_blocks(computed.blocks[self.number], self.ours.kernel_blocks_per_block)
        blocks = table[first // block_tokens : -(-end // block_tokens)]
        if not blocks.size or not blocks.all() or blocks.size * block_tokens < end - first:
            return NOTHING
        found = {
            (plane.layer, plane.content): self._tokens(plane, blocks, end - first)
            for plane in self.planes
        }
        return Sample(tokens, found)

    def range_of(self, request: ReadRequest, computed: LocallyComputed) -> range:
        """Which tokens a sample has; none where the engine has computed too few."""
        block_tokens = self.planes[0].counts.block_tokens
        if not self.group.window_tokens:
            return range(min(computed.tokens, request.remote_tokens, _SAMPLED_TOKENS))
        # A peer may name a window's last blocks alone.
        end = request.remote_tokens if computed.tokens >= request.remote_tokens else 0
        return range(max(0, end - _SAMPLED_TOKENS) // block_tokens * block_tokens, end)

    def _tokens(self, plane: Plane, blocks: npt.NDArray[np.int64], tokens: int) -> Bytes:
        if self.storageless is not None:
            return self.storageless.first_tokens(plane, blocks, tokens)
        return first_tokens(self.tensors[plane.layer], plane, blocks.tolist(), tokens)

    def dtype(self, plane: Plane) -> torch.dtype:
        """Of a plane's items."""
        return self.tensors[plane.layer].dtype


def bytes_of_block(rank: RemoteRank, planes: Sequence[Plane]) -> int:
    """Of a peer's kernel block, in all regions that hold these planes."""
    regions = {region_of(rank, plane_like(rank, plane)) for plane in planes}
    return sum(rank.metadata.block_bytes[region] for region in regions)


def plane_like(rank: RemoteRank, plane: Plane) -> Plane:
    """A peer's plane of the layer and content of one of ours."""
    return next(p for p in rank.planes if (p.layer, p.content) == (plane.layer, plane.content))


def region_of(rank: RemoteRank, plane: Plane) -> int:
    """The region of a peer that one of its planes lies in."""
    metadata = rank.metadata
    return next(
        number
        for number, (start, length) in enumerate(
            zip(metadata.addresses, metadata.block_bytes, strict=True)
        )
        if start <= plane.address < start + length
    )


class LandedBlocks:
    """Some blocks of a peer, side by side in memory of ours, in place of the cache.

    Args:
        blocks: the peer's kernel blocks.
        probed: of how many kernel blocks behind number 0 the beginnings are read too.
    """

    #: Of a kernel block's beginning: some of its first token's values.
    _PROBE_BYTES = 256

    def __init__(
        self, rank: RemoteRank, planes: Sequence[Plane], blocks: Sequence[int], probed: int
    ):
        metadata = rank.metadata
        self._rank = rank
        self._blocks = {block: place for place, block in enumerate(blocks)}
        self._regions = sorted({region_of(rank, plane_like(rank, plane)) for plane in planes})
        self._starts: dict[int, int] = {}
        self._probes: list[tuple[int, int, int]] = []
        self._bytes: Bytes | None = None
        address: list[int] = []
        length: list[int] = []
        for region in self._regions:
            self._starts[region] = sum(length)
            for block in blocks:
                address.append(metadata.addresses[region] + block * metadata.stride_bytes[region])
                length.append(metadata.block_bytes[region])
        for region in self._regions:
            for block in range(1, probed + 1):
                size = min(self._PROBE_BYTES, metadata.block_bytes[region])
                self._probes.append((block, sum(length), size))
                address.append(metadata.addresses[region] + block * metadata.stride_bytes[region])
                length.append(size)
        lengths = np.array(length, dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        self.chunk = Chunk(
            np.array(address, dtype=np.int64), offsets, lengths, int(lengths.sum()), ()
        )

    def mark(self) -> None:
        """Nothing: it copies to where nobody else does."""

    def place(
        self, staging: torch.Tensor, placements: tuple[Placement, ...], after: None
    ) -> Callable[[], bool]:
        """Keeps a copy."""
        self._bytes = staging.cpu().numpy().copy()
        return done

    def zero(self, tails: Tails, after: None) -> Callable[[], bool]:
        """Nothing: nobody fills these blocks any further."""
        return done

    def settle(self) -> None:
        """Nothing is under way."""

    def give_up(self, copies: Iterable[Callable[[], bool]]) -> None:
        """Nothing is under way."""

    @property
    def has_landed(self) -> bool:
        return self._bytes is not None

    def first_written(self) -> int | None:
        """The first of the probed kernel blocks that is not all zeros; None where regions
        disagree, or all are.
        """
        if self._bytes is None:
            return None
        written: dict[int, list[bool]] = {}
        for block, start, size in self._probes:
            written.setdefault(block, []).append(bool(self._bytes[start : start + size].any()))
        found = next((block for block in sorted(written) if any(written[block])), None)
        return found if found is not None and all(written[found]) else None

    def tokens(self, rank: RemoteRank, ours: Plane) -> tuple[Bytes, npt.NDArray[np.int64], Plane]:
        """([token, head, channel, byte], byte offset of each (token, head), plane) of all blocks.

        Args:
            rank: the peer as it would be, in the layout that is tried.
        """
        plane = plane_like(rank, ours)
        region = region_of(rank, plane)
        metadata = rank.metadata
        length, blocks = metadata.block_bytes[region], len(self._blocks)
        shown = replace(
            plane,
            address=self._starts[region] + plane.address - metadata.addresses[region],
            strides_bytes=plane.strides_bytes._replace(block=length),
            counts=plane.counts._replace(blocks=blocks),
        )
        array = shown.as_array(self._bytes, 0).swapaxes(1, 2)
        counts = shown.counts
        block, token, head = np.ogrid[:blocks, : counts.block_tokens, : counts.heads]
        places = shown.byte_offset(block, head, token, 0)
        return array.reshape(-1, *array.shape[2:]), places.reshape(-1, counts.heads), plane

    def of_block(self, ours: Plane, block: int) -> Bytes:
        """[token, head, channel, byte] of one kernel block."""
        found, _, plane = self.tokens(self._rank, ours)
        tokens = plane.counts.block_tokens
        place = self._blocks[block]
        return found[place * tokens : (place + 1) * tokens]


def shared_heads(ours: Plane, theirs: Plane) -> tuple[slice, slice]:
    """The heads that both hold, as each counts them."""
    first = max(ours.first_head, theirs.first_head)
    end = min(ours.end_head, theirs.end_head)
    return (
        slice(first - ours.first_head, end - ours.first_head),
        slice(first - theirs.first_head, end - theirs.first_head),
    )
