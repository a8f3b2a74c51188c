"""Memory, a tensor's facts without torch, and the content of one layer as byte strides."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Literal, NamedTuple

from kvpatch.core.errors import UnreadableGeometry

_END_OF_ADDRESSES = 2**63 - 1
"""Plans count bytes in signed 64-bit integers."""


@dataclass(frozen=True)
class Memory:
    """A memory as NIXL names it.

    Attributes:
        kind: "DRAM" for the host, "VRAM" for a device.
        device_id: the device's index; 0 for the host.
    """

    kind: Literal["DRAM", "VRAM"]
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("DRAM", "VRAM"):
            raise UnreadableGeometry(f"memory: expected DRAM or VRAM, found {self.kind!r}")
        if self.device_id < 0:
            raise UnreadableGeometry(
                f"memory: expected a device index of 0 or more, found {self.device_id}"
            )


@dataclass(frozen=True)
class TensorFacts:
    """The place and shape of one tensor, as its framework states them.

    Nothing is checked here: :func:`~kvpatch.geometry.planes_of_tensors.read_planes` does that, and
    knows the layer's name to put into its refusal.

    Attributes:
        address: of the first element.
        shape: sizes, in elements.
        strides: in elements, one per dimension.
        storage_address: where the allocation behind the tensor starts.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    memory: Memory
    storage_address: int
    storage_bytes: int


def extent_bytes(axes: Iterable[tuple[int, int]], item_bytes: int) -> int:
    """Returns the bytes from the first to past the last element of ``(size, stride_bytes)`` axes.

    Does not validate: sizes are at least 1, strides at least 0.
    """
    return sum((size - 1) * stride for size, stride in axes) + item_bytes


def axes_nest(axes: Iterable[tuple[int, int]], item_bytes: int) -> bool:
    """True if no two elements can share a byte, by strides that step over one another.

    Each axis, from the smallest stride up, must step past everything that the smaller
    ones reach. Every layout that an engine makes does; a set of strides that does not
    either overlaps or is one that nobody has read yet.
    """
    reach = item_bytes
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


class Content(Enum):
    """The kind of content that a plane's elements have; only like contents are ever copied."""

    KEY = "key"
    VALUE = "value"
    LATENT = "latent"
    """One vector that stands for both: MLA, its indexers, hidden states."""
    SLOT = "slot"
    """Opaque bytes of all of a rank's heads; a block has several such in place of heads."""
    STATE = "state"
    """Opaque bytes of a whole block, without tokens in it: Mamba."""


class Strides(NamedTuple):
    """The bytes from one element to the next along each axis."""

    block: int
    head: int
    token: int
    channel: int


class Tile(NamedTuple):
    """A tile of a plane whose tokens and channels lie in two steps each: from tile to tile, as the
    plane's strides say, and inside a tile.

    Attributes:
        tokens, channels: of a tile.
        token_step, channel_step: bytes from one to the next inside a tile.
    """

    tokens: int
    token_step: int
    channels: int
    channel_step: int


class Counts(NamedTuple):
    """Sizes of the axes. ``block_tokens`` is the tensor's own, so the kernel's block size."""

    blocks: int
    heads: int
    block_tokens: int
    channels: int


@dataclass(frozen=True)
class Plane:
    """A strided array (block, head, token, channel) of items in some memory.

    Two layers that share a tensor give two planes with one address. Of a tiled plane the strides
    of tokens and channels are those from tile to tile.

    Attributes:
        address: of item (0, 0, 0, 0).
        first_head: the global number of the plane's head 0, so that planes of other
            tensor-parallel ranks can be matched; 0 where the content has no heads.
        is_whole: whether a block is no rows of tokens, but one thing that moves whole: its bytes
            stand for its tokens all together.
        tile: None where one stride leads from each token to the next, and from each channel.
    """

    layer: str
    content: Content
    address: int
    strides_bytes: Strides
    counts: Counts
    item_bytes: int
    first_head: int
    memory: Memory
    is_whole: bool = False
    tile: Tile | None = None

    def __post_init__(self) -> None:
        counts, tile = self.counts, self.tile
        if tile is not None and (
            min(tile) < 1 or counts.block_tokens % tile.tokens or counts.channels % tile.channels
        ):
            raise UnreadableGeometry(f"{self}: expected a whole number of tiles in a block")
        if (
            min(counts) < 1
            or min(self.strides_bytes) < 0
            or self.item_bytes < 1
            or self.address < 0
            or self.first_head < 0
        ):
            raise UnreadableGeometry(
                f"{self}: expected counts and item size of 1 or more, and no negative number"
            )
        if not axes_nest(self.axes, self.item_bytes):
            raise UnreadableGeometry(
                f"{self}: expected strides that step over one another, found overlapping ones"
            )
        if self.span()[1] > _END_OF_ADDRESSES:
            raise UnreadableGeometry(f"{self}: expected it to end below 2**63")

    def __str__(self) -> str:
        shape, strides = tuple(self.counts), tuple(self.strides_bytes)
        tiles = "" if self.tile is None else f"tiles {tuple(self.tile)}, "
        return (
            f"{self.content.value} plane of layer {self.layer!r} (block, head, token, channel): "
            f"shape {shape}, strides {strides} bytes, {tiles}items of {self.item_bytes} bytes at "
            f"{self.address:#x} in {self.memory.kind}:{self.memory.device_id}, "
            f"heads from {self.first_head}"
        )

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """(size, stride in bytes) of block, head, token and channel.

        Of a tiled plane tokens and channels are two axes each, the one from tile to tile first.
        """
        block, head, _, _ = zip(self.counts, self.strides_bytes, strict=True)
        return (block, head, *self.token_axes, *self.channel_axes)

    @property
    def token_axes(self) -> tuple[tuple[int, int], ...]:
        """(size, stride in bytes) of tokens: one axis, or two where there are tiles."""
        tokens, stride = self.counts.block_tokens, self.strides_bytes.token
        if self.tile is None:
            return ((tokens, stride),)
        inside = self.tile.tokens, self.tile.token_step
        return ((tokens // self.tile.tokens, stride), inside)

    @property
    def channel_axes(self) -> tuple[tuple[int, int], ...]:
        """The same of channels."""
        channels, stride = self.counts.channels, self.strides_bytes.channel
        if self.tile is None:
            return ((channels, stride),)
        inside = self.tile.channels, self.tile.channel_step
        return ((channels // self.tile.channels, stride), inside)

    @property
    def end_head(self) -> int:
        return self.first_head + self.counts.heads

    def span(self) -> tuple[int, int]:
        """The lowest address that the plane touches, and the one past its highest."""
        return self.address, self.address + extent_bytes(self.axes, self.item_bytes)


HeadName = tuple[str, Content, int]
"""Layer, content and global number of a head."""


def names_of_heads(planes: Iterable[Plane]) -> frozenset[HeadName]:
    """Every head of every content of every layer of some planes."""
    return frozenset(
        (plane.layer, plane.content, head)
        for plane in planes
        for head in range(plane.first_head, plane.end_head)
    )


def planes_without(planes: Iterable[Plane], heads: Collection[HeadName]) -> list[Plane]:
    """Planes but for some of their heads; one that moves whole is left out with all of them."""
    found = []
    for plane in planes:
        numbers = range(plane.first_head, plane.end_head)
        left = [one for one in numbers if (plane.layer, plane.content, one) not in heads]
        found += [plane] if left and plane.is_whole else planes_of_heads(plane, left)
    return found


def planes_of_heads(plane: Plane, heads: Collection[int]) -> list[Plane]:
    """Returns a plane's heads that are among `heads`; several planes where these have gaps."""
    wanted = [head for head in range(plane.first_head, plane.end_head) if head in heads]
    if len(wanted) == plane.counts.heads:
        return [plane]
    if plane.is_whole:
        return []  # its heads cannot be told apart
    runs = (list(run) for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]))
    return [
        replace(
            plane,
            address=plane.address + (run[0][1] - plane.first_head) * plane.strides_bytes.head,
            counts=plane.counts._replace(heads=len(run)),
            first_head=run[0][1],
        )
        for run in runs
    ]
