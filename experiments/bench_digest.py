"""Measures a digest of a request's cache beside a plain copy of the same bytes.

    python experiments/bench_digest.py [--mib 64] [--repeat 7] [--device cuda] [--json FILE]

One thread on the host: "copy" is one piece of memory into another, "digest" all that a worker
does. The ways take turns. Blocks are scattered in memory that no cache holds. For a device the
operations of the same request are counted in torch's "meta" tensors; --device cuda times both on
one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bench_transfer import wait_for
from harness import Goal, conclude, console_of, options_of, seconds_of, table_of
from rich.progress import track
from rich.table import Table

from kvpatch.checks.cache_digests import SLICE_BYTES, TableTokens, sums_of
from kvpatch.checks.digest_pieces import DigestPiece
from kvpatch.checks.digests import Weights
from kvpatch.geometry.plane import Content, Memory
from kvpatch.geometry.segments import BlockList
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.one_memory import Bytes
from tests.geometry.whole_caches import CacheSizes, named_layout
from tests.transfer.operations import Operations

_RANGE_TOKENS = 256
_ADDRESS = 1 << 32
_MIB = 1024**2


@dataclass(frozen=True)
class Cache:
    """A layout with its model; one rank of it."""

    name: str
    layout: str
    block_tokens: int
    layers: int
    heads: int
    channels: int
    item_bytes: int
    most: float
    contents: tuple[Content, ...] = (Content.KEY, Content.VALUE)

    @property
    def token_bytes(self) -> int:
        row = self.channels * self.item_bytes * len(self.contents)
        return self.layers * self.heads * row

    def sizes(self, blocks: int) -> CacheSizes:
        """Returns the sizes of a cache of so many blocks."""
        return CacheSizes(
            self.layers, blocks, self.heads, self.block_tokens, self.channels, self.item_bytes,
            contents=self.contents,
        )  # fmt: skip


CACHES = (
    Cache("heads outside tokens", "LBHNC", 16, 32, 8, 128, 2, 4),
    Cache("tokens outside heads", "LBNHC", 16, 32, 8, 128, 2, 4),
    Cache("cross-layer blocks", "BLHNC", 16, 32, 8, 128, 2, 4),
    Cache("fp8", "LBHNC", 16, 32, 8, 128, 1, 6),
    Cache("MLA", "NHD", 64, 27, 1, 576, 2, 4, (Content.LATENT,)),
    Cache("keys by column, CPU", "CPU_packed", 128, 30, 3, 64, 2, 6),
)


@dataclass
class Row:
    """One cache; seconds are medians, for ``mib`` of it."""

    name: str
    layout: str
    mib: float
    tokens: int
    copy_seconds: float
    digest_seconds: float
    digest_of_copy: float
    slices: int
    operations: int
    most: float


class Request:
    """Scattered blocks of a cache, all but one token of them."""

    def __init__(self, cache: Cache, tokens: int, device: str) -> None:
        held = -(-tokens // cache.block_tokens)
        sizes = cache.sizes(held + 1)
        memory = noise(sizes.total_bytes(), device)
        lies = Bytes(_ADDRESS if device == "meta" else memory.data_ptr(), memory)
        planes = named_layout(cache.layout).planes(sizes, lies.address, Memory("DRAM"))
        memories = dict.fromkeys((plane.layer for plane in planes), lies)
        order = np.random.default_rng(0).permutation(held + 1)[:held]
        blocks = BlockList(order, cache.block_tokens)
        self.table = TableTokens({}, memories, tuple(planes), blocks, 0, tokens)

    @property
    def slices(self) -> int:
        """Returns how often a device is asked, of planes alike at a time."""
        held = self.table.blocks.block_ids.size
        return sum(
            -(-len(alike.planes) * held * alike.block_bytes // SLICE_BYTES)
            for alike in self.table.alike()
        )

    def pieces(self) -> Iterator[DigestPiece]:
        for alike in self.table.alike():
            run = [(0, self.table.end_token)]
            yield from self.table.pieces(alike, run, _RANGE_TOKENS, Weights(b"request"))

    def digest(self, name: str = "request") -> None:
        run = [(0, self.table.end_token)]
        self.table.digests(run, _RANGE_TOKENS, Weights(name.encode()))


def noise(size: int, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def measure(cache: Cache, mib: int, repeat: int, device: str) -> Row:
    tokens = mib * _MIB // cache.token_bytes // cache.block_tokens * cache.block_tokens - 1
    size = tokens * cache.token_bytes
    request = Request(cache, tokens, device)
    source = noise(size, device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        wait_for(target)

    copy()
    request.digest()
    turns = [
        (seconds_of(copy), seconds_of(lambda turn=turn: request.digest(f"request {turn}")))
        for turn in range(repeat)
    ]
    with Operations() as counted:
        for piece in Request(cache, tokens, "meta").pieces():
            sums_of(piece)
    return Row(
        cache.name, cache.layout, size / _MIB, tokens,
        statistics.median(copied for copied, _ in turns),
        statistics.median(digest for _, digest in turns),
        statistics.median(digest / copied for copied, digest in turns),
        request.slices, counted.count, cache.most,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    columns = ("cache", "layout", "MiB", "tokens", "copy ms", "digest ms", "digest/copy", "MiB/s",
               "operations", "for 16 MiB")  # fmt: skip
    return table_of("one thread; the last two of a device", columns, (
        (row.name, row.layout, f"{row.mib:.0f}", f"{row.tokens:,}",
         f"{row.copy_seconds * 1e3:.1f}", f"{row.digest_seconds * 1e3:.1f}",
         f"{row.digest_of_copy:.2f}", f"{row.mib / row.digest_seconds:,.0f}",
         f"{row.operations:,}", f"{row.operations / row.slices:.1f}")
        for row in rows
    ))  # fmt: skip


def goals(rows: Sequence[Row]) -> list[Goal]:
    return [
        goal
        for row in rows
        for goal in (
            Goal(f"{row.name}: digest / copy", row.digest_of_copy, row.most),
            Goal(f"{row.name}: operations for 16 MiB", row.operations / row.slices, 24),
        )
    ]


def main() -> None:
    options = options_of(
        __doc__,
        mib=(64, "of the cache that is digested"),
        repeat=(7, "turns of each row"),
        device=("cpu", "of the cache: cpu or cuda"),
    )
    torch.set_num_threads(1)
    kernel_thread.patience_seconds = 60.0  # what is measured is not the time until it is there
    console = console_of(160)
    rows = [
        measure(cache, options.mib, options.repeat, options.device)
        for cache in track(CACHES, "measuring", console=console)
    ]
    console.print(table(rows))
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    main()
