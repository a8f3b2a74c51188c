"""One request's keys and values, and the caches of engines that hold them, each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvpatch.checks.cache_digests import TableTokens, memories_of
from kvpatch.checks.digests import Digests, Weights
from kvpatch.geometry.plane import Memory, Plane
from kvpatch.geometry.segments import BlockList
from kvpatch.transfer.one_memory import Bytes
from tests.geometry.whole_caches import CacheSizes, as_array, named_layout

#: [layer, keys or values, head, token, channel, byte]
Request = npt.NDArray[np.uint8]
SEED = b"request 1"


def request_of(
    layers: int = 3, heads: int = 4, tokens: int = 70, channels: int = 8, item_bytes: int = 2
) -> Request:
    """Random bytes."""
    shape = (layers, 2, heads, tokens, channels, item_bytes)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def digested(
    memories: Mapping[str, Bytes],
    planes: Sequence[Plane],
    blocks: BlockList,
    range_tokens: int,
    extent: tuple[int, int],
    weights: Weights | None = None,
) -> Digests:
    """Digests of one run of a request's tokens."""
    table = TableTokens({}, memories, tuple(planes), blocks, *extent)
    found = table.digests([extent], range_tokens, weights or Weights(SEED))
    assert found is not None
    return found


@dataclass(frozen=True)
class Rank:
    """How one engine's rank holds a request; ``heads`` are those that it has."""

    layout: str = "HND"
    block_tokens: int = 16
    heads: range = range(4)
    first_token: int = 0
    seed: int = 1


class Engine:
    """A rank's caches, full of other requests' bytes but for the request's blocks."""

    def __init__(self, request: Request, rank: Rank) -> None:
        layers, _, _, tokens, channels, item_bytes = request.shape
        rng = np.random.default_rng(rank.seed)
        held = -(-(tokens - rank.first_token) // rank.block_tokens)
        sizes = CacheSizes(
            layers, held + 3, len(rank.heads), rank.block_tokens, channels, item_bytes
        )
        self.memory = torch.from_numpy(rng.integers(0, 256, sizes.total_bytes(), dtype=np.uint8))
        self.address = self.memory.data_ptr()
        self.planes = named_layout(rank.layout).planes(
            sizes, self.address, Memory("DRAM"), first_head=rank.heads.start
        )
        ids = rng.permutation(held + 3)[:held]
        self.blocks = BlockList(ids, rank.block_tokens, rank.first_token)
        self.end_token = tokens
        for number, plane in enumerate(self.planes):
            wanted = request[number // 2, number % 2, rank.heads.start : rank.heads.stop]
            self.write(plane, wanted[:, rank.first_token :], rank.first_token)

    def view(self, plane: Plane) -> npt.NDArray[np.uint8]:
        """[block, head, token, channel, byte]; writes reach the cache."""
        return as_array(plane, self.memory.numpy(), self.address)

    def write(self, plane: Plane, values: npt.NDArray[np.uint8], first_token: int) -> None:
        """[head, token, channel, byte] to their places."""
        tokens = np.arange(first_token, first_token + values.shape[1])
        block, offset = self.blocks.locate(tokens)
        self.view(plane)[block, :, offset] = values.swapaxes(0, 1)

    def digests(
        self,
        range_tokens: int = 16,
        first_token: int | None = None,
        end_token: int | None = None,
        weights: Weights | None = None,
        change: Callable[[Plane], Plane] = lambda plane: plane,
    ) -> Digests:
        """Of the request's tokens, or some."""
        planes = [change(plane) for plane in self.planes]
        memories = memories_of(dict.fromkeys((plane.layer for plane in planes), self.memory))
        first = self.blocks.first_token if first_token is None else first_token
        end = self.end_token if end_token is None else end_token
        return digested(memories, planes, self.blocks, range_tokens, (first, end), weights)


def as_whole(plane: Plane) -> Plane:
    """The same blocks, never cut."""
    return replace(plane, is_whole=True)
