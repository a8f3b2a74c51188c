"""Pairs the blocks of two engines by the tokens they hold, never by their place in a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpatch.geometry.errors import UnpairableBlocks

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockList:
    """A request's blocks of one engine, in token order.

    Attributes:
        block_ids: one-dimensional; ids count the blocks of the planes they will be used
            with, so kernel blocks where those are smaller (:func:`kernel_blocks`).
        block_tokens: tokens of one block.
        first_token: the position in the request of the first token of the first block;
            not 0 where the list starts behind a prefix hit or inside a sliding window.
    """

    block_ids: Int64Array
    block_tokens: int
    first_token: int = 0

    def __post_init__(self) -> None:
        ids = np.asarray(self.block_ids, dtype=np.int64)
        object.__setattr__(self, "block_ids", ids)
        if ids.ndim != 1 or self.block_tokens < 1 or self.first_token < 0:
            raise UnpairableBlocks(
                "block list: expected a flat list, blocks of 1 token or more and a first token of "
                f"0 or more, found {ids.ndim} dimensions, {self.block_tokens} and "
                f"{self.first_token}"
            )
        if ids.size and int(ids.min()) < 0:
            raise UnpairableBlocks(f"block list: expected ids of 0 or more, found {int(ids.min())}")

    @property
    def end_token(self) -> int:
        """The position past the last token that the blocks have room for."""
        return self.first_token + self.block_ids.size * self.block_tokens

    def locate(self, tokens: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Block id and offset in the block of each token position. Does not validate."""
        index, offset = np.divmod(tokens - self.first_token, self.block_tokens)
        return self.block_ids[index], offset


class Kind(NamedTuple):
    """Segments that differ in their blocks only."""

    remote_offset: int
    local_offset: int
    tokens: int
    remote_block: Int64Array
    local_block: Int64Array


@dataclass(frozen=True)
class Segments:
    """Runs of tokens that lie in one block on each side: five columns of one length."""

    remote_block: Int64Array
    remote_offset: Int64Array
    local_block: Int64Array
    local_offset: Int64Array
    tokens: Int64Array

    def __len__(self) -> int:
        return int(self.tokens.size)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The segments by what they have in common beside their blocks."""
        columns = np.stack((self.remote_offset, self.local_offset, self.tokens), axis=1)
        kinds, kind = np.unique(columns, axis=0, return_inverse=True)
        kind = kind.reshape(-1)  # numpy 2.0 gave it a second axis
        return tuple(
            Kind(
                int(remote),
                int(local),
                int(tokens),
                self.remote_block[chosen],
                self.local_block[chosen],
            )
            for number, (remote, local, tokens) in enumerate(kinds)
            for chosen in (kind == number,)
        )

    def as_array(self) -> Int64Array:
        """[segment, (remote_block, remote_offset, local_block, local_offset, tokens)]."""
        return np.stack(
            (
                self.remote_block,
                self.remote_offset,
                self.local_block,
                self.local_offset,
                self.tokens,
            ),
            axis=1,
        )


def pair_blocks(remote: BlockList, local: BlockList, first_token: int, end_token: int) -> Segments:
    """Segments that cover tokens ``first_token`` to ``end_token`` exactly once, in order.

    Raises:
        UnpairableBlocks: either list lacks a token that is asked for, or the local one
            names a block twice, which would then be written twice.
    """
    if first_token > end_token or first_token < 0:
        raise UnpairableBlocks(f"expected a range of tokens, found {first_token} to {end_token}")
    if first_token < end_token:
        for side, blocks in (("remote", remote), ("local", local)):
            if first_token < blocks.first_token or end_token > blocks.end_token:
                raise UnpairableBlocks(
                    f"expected {side} blocks for tokens {first_token} to {end_token}, found "
                    f"{blocks.block_ids.size} blocks of {blocks.block_tokens} for tokens "
                    f"{blocks.first_token} to {blocks.end_token}"
                )
        _check_distinct(local, first_token, end_token)
    borders = (_borders(blocks, first_token, end_token) for blocks in (remote, local))
    starts, tokens = _cut(first_token, end_token, *borders)
    return Segments(*remote.locate(starts), *local.locate(starts), tokens)


def uncovered_tail(local: BlockList, end_token: int) -> Segments:
    """What lies behind the last token in the local blocks, to be zeroed.

    Both sides of each segment are the local block. Tokens before a transfer are not
    listed: a prefix hit put them there.

    Raises:
        UnpairableBlocks: ``end_token`` lies outside the blocks.
    """
    if not local.first_token <= end_token <= local.end_token:
        raise UnpairableBlocks(
            f"expected a last token within {local.first_token} to {local.end_token}, "
            f"found {end_token}"
        )
    return pair_blocks(local, local, end_token, local.end_token)


def kernel_blocks(block_ids: Sequence[int] | Int64Array, parts: int) -> Int64Array:
    """The kernel blocks of logical blocks that are cut into ``parts`` each, in order.

    Raises:
        UnpairableBlocks: ``parts`` is not 1 or more.
    """
    if parts < 1:
        raise UnpairableBlocks(f"expected 1 or more kernel blocks to a block, found {parts}")
    ids = np.asarray(block_ids, dtype=np.int64)
    return (ids[:, None] * parts + np.arange(parts, dtype=np.int64)).reshape(-1)


def _check_distinct(local: BlockList, first_token: int, end_token: int) -> None:
    first = (first_token - local.first_token) // local.block_tokens
    end = -((local.first_token - end_token) // local.block_tokens)
    written = local.block_ids[first:end]
    if np.unique(written).size != written.size:
        raise UnpairableBlocks(
            f"expected each local block once for tokens {first_token} to {end_token}, found "
            f"{written.size - np.unique(written).size} of {written.size} repeated"
        )


def _borders(blocks: BlockList, first_token: int, end_token: int) -> Int64Array:
    """Positions strictly inside the range where a new block begins."""
    behind = (first_token - blocks.first_token) // blocks.block_tokens + 1
    return np.arange(
        blocks.first_token + behind * blocks.block_tokens,
        end_token,
        blocks.block_tokens,
        dtype=np.int64,
    )


def _cut(first_token: int, end_token: int, *borders: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Starts and lengths of the pieces that the borders cut the range into."""
    if first_token == end_token:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty
    starts = np.unique(np.concatenate((np.array([first_token], dtype=np.int64), *borders)))
    return starts, np.diff(starts, append=np.int64(end_token))
