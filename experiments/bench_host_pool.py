"""Measures how fast blocks are saved to the host buffer, beside one plain copy of the same bytes.

    python experiments/bench_host_pool.py [--mib 256] [--repeat 9] [--device cpu] [--json FILE]

"plain" is one ``copy_`` of as many bytes in one piece, into host memory of the same kind as
the pool's; the two are timed in turn, each time with its wait. Host blocks follow one another in
runs, 64 blocks each, as the host block table hands them out to a step's blocks, and so do blocks,
as a cache hands them out that has not been full yet ("both"); or blocks are scattered ("runs"), or
both are ("scattered", the worst case). Each row's bytes are compared before it is timed, and a
spoiled byte must be noticed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import torch
from bench_transfer import wait_for
from harness import conclude, console_of, options_of, seconds_of, table_of
from rich.table import Table

from kvpatch.host_buffer.host_pool import HostPool, block_bytes, host_bytes

RUN_BLOCKS = 64


@dataclass(frozen=True)
class Model:
    """A cache: the shape of a layer's tensor for one block, and where blocks come in it."""

    name: str
    layers: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def tensors(self, blocks: int, device: str) -> dict[str, torch.Tensor]:
        """Returns noise, bfloat16, in memory of torch's own, as an engine's."""
        shape = (*self.before, blocks, *self.after)
        count = int(np.prod(shape)) * 2
        noise = np.random.default_rng(0)
        return {
            f"layer.{layer}": torch.from_numpy(noise.integers(0, 256, count, dtype=np.uint8))
            .to(device, copy=True)
            .view(torch.bfloat16)
            .view(shape)
            for layer in range(self.layers)
        }


MODELS = (
    Model("keys first, 16 tokens, 8 heads of 128, 32 layers", 32, (2,), (16, 8, 128)),
    Model("packed HND, 64 tokens, 8 heads of 128, 32 layers", 32, (), (8, 64, 256)),
    Model("packed, 16 tokens, 1 head of 64, 24 layers (4 KiB)", 24, (), (1, 16, 128)),
    Model("latent, 64 tokens of 576, 60 layers", 60, (), (64, 576)),
)


@dataclass
class Measured:
    """One row; seconds are medians."""

    model: str
    host_blocks: str
    device: str
    saved_bytes: int
    pool_seconds: float
    plain_seconds: float
    ratio: float


def numbers(host_blocks: int, how: str, seed: int = 1) -> np.ndarray:
    """Returns all host blocks in the order in which blocks go to them; half are used."""
    generator = np.random.default_rng(seed)
    if how == "scattered":
        return generator.permutation(host_blocks)
    starts = generator.permutation(-(-host_blocks // RUN_BLOCKS)) * RUN_BLOCKS
    return np.concatenate([np.arange(s, min(s + RUN_BLOCKS, host_blocks)) for s in starts])


def is_identical(
    pool: HostPool,
    tensors: dict[str, torch.Tensor],
    blocks: list[int],
    host_blocks: list[int],
    at: int,
) -> bool:
    """True if each host block holds its block, layer by layer, as torch indexes them."""
    of, into = torch.tensor(blocks), torch.tensor(host_blocks)
    return all(
        torch.equal(
            pool.tensors[layer].index_select(at, into).view(torch.int16),
            tensor.index_select(at, of.to(tensor.device)).cpu().view(torch.int16),
        )
        for layer, tensor in tensors.items()
    )


def measure(model: Model, mib: int, repeat: int, device: str) -> list[Measured]:
    at = len(model.before)
    one = model.tensors(1, "cpu")
    size = block_bytes(one, dict.fromkeys(one, at), 1)
    host_blocks = max(RUN_BLOCKS, mib * 1024**2 // size)
    blocks = 2 * host_blocks
    tensors = model.tensors(blocks, device)
    pool = HostPool(tensors, dict.fromkeys(tensors, at), blocks, blocks)
    scattered = np.random.default_rng(2).permutation(blocks)[:host_blocks].tolist()
    source = torch.ones(host_blocks * size, dtype=torch.uint8, device=device)
    target = host_bytes(host_blocks * size, source.device, source)

    def plain() -> None:
        target.copy_(source, non_blocking=device != "cpu")
        wait_for(source)

    found = []
    for how in ("both", "runs", "scattered"):
        into = numbers(blocks, how)[:host_blocks].tolist()
        saved = numbers(blocks, how, seed=3)[:host_blocks].tolist() if how == "both" else scattered

        def save(into: list[int] = into, saved: list[int] = saved) -> None:
            pool.save(saved, into)
            pool.settle()

        save()
        last = pool.tensors[f"layer.{model.layers - 1}"].view(torch.int16)
        if not is_identical(pool, tensors, saved, into, at):
            raise SystemExit(f"{model.name}, {how}: a host block does not hold its block")
        spoiled = last.select(at, into[-1])
        spoiled[(-1,) * spoiled.ndim] ^= 1
        if is_identical(pool, tensors, saved, into, at):
            raise SystemExit(f"{model.name}, {how}: a spoiled byte was not noticed")
        plain()
        pairs = [(seconds_of(save), seconds_of(plain)) for _ in range(repeat)]
        pool_seconds, plain_seconds = (
            statistics.median(column) for column in zip(*pairs, strict=True)
        )
        found.append(
            Measured(
                model.name,
                how,
                device,
                host_blocks * size,
                pool_seconds,
                plain_seconds,
                statistics.median(theirs / ours for ours, theirs in pairs),
            )  # fmt: skip
        )
    return found


def table(rows: list[Measured]) -> Table:
    columns = ("cache", "host blocks", "MiB", "GB/s", "plain copy GB/s", "of plain copy")
    return table_of("", columns, (
        (row.model, row.host_blocks, f"{row.saved_bytes / 2**20:.0f}",
         f"{row.saved_bytes / row.pool_seconds / 1e9:.2f}",
         f"{row.saved_bytes / row.plain_seconds / 1e9:.2f}", f"{row.ratio:.2f}")
        for row in rows
    ))  # fmt: skip


def main() -> None:
    options = options_of(
        __doc__,
        mib=(256, "size of what is saved at once"),
        repeat=(9, "turns of each row"),
        device=("cpu", "of the caches"),
    )
    console = console_of(120)
    rows: list[Measured] = []
    for model in MODELS:
        rows += measure(model, options.mib, options.repeat, options.device)
    console.print(table(rows))
    conclude(rows, (), options, console)


if __name__ == "__main__":
    main()
