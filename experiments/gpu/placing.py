"""Measures how fast a device places what has landed, beside a plain copy of as many bytes on it.

A request's chunks, one behind the other: more than a device's caches hold. The time is the device's
own, by its events: a launch a chunk, with the table that it reads. "asked" is what the host's
thread takes to ask for one. Bytes are compared with what torch's indexing places.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.gpu.rows import Rows, options_of
from kvpatch.transfer import kernel_thread
from kvpatch.transfer.caches import placing_on
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.place import place_on_device
from tests.transfer.operations import PAIRS, chunks_of

_ADDRESS = 1 << 32
_REPEAT = 5


def main() -> None:
    """Writes a row for each pair."""
    options = options_of(__doc__, tokens=2000)
    rows = Rows(options.json)
    device = torch.device(options.device)
    kernel_thread.patience_seconds = 60.0
    place = placing_on(device)
    for pair in PAIRS:
        chunks, size_bytes = chunks_of(pair, 32, options.tokens)
        sizes = [chunk.buffer_bytes for chunk in chunks]
        landed = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device=device)
        staged = landed.split(sizes)
        found, expected = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in "12")
        to_found, to_expected = (
            [[(Bytes(_ADDRESS, cache), one) for one in chunk.placements] for chunk in chunks]
            for cache in (found, expected)
        )

        def place_all(staged: Any = staged, into: Any = to_found) -> None:
            for buffer, placements in zip(staged, into, strict=True):
                place(buffer, placements)

        for buffer, placements in zip(staged, to_expected, strict=True):
            place_on_device(buffer, placements)
        placed, asked = _seconds(place_all, device)
        other = torch.empty_like(landed)
        copied, _ = _seconds(lambda other=other, landed=landed: other.copy_(landed), device)
        rows.add(
            f"{pair[0]} {pair[1]} -> {pair[2]} {pair[3]}",
            way="kernel" if _is_by_kernel(device) else "indexing",
            mib=landed.numel() / 2**20,
            chunks=len(chunks),
            is_right=bool(torch.equal(found, expected)),
            gb_per_second=landed.numel() / placed / 1e9,
            of_copy=copied / placed,
            asked_ms=1e3 * asked / len(chunks),
        )


def _is_by_kernel(device: torch.device) -> bool:
    """True if the kernel has passed all of its trials."""
    return device.type == "cuda" and kernel_thread.have_passed()


def _seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(the device's, the host's to ask for it): medians, the first turns left out."""
    found = []
    for _ in range(_REPEAT + 2):
        if device.type == "cpu":
            began = time.perf_counter()
            work()
            passed = time.perf_counter() - began
            found.append((passed, passed))
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in "12")
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # what is asked for meanwhile runs without a gap
        before.record()
        began = time.perf_counter()
        work()
        asked = time.perf_counter() - began
        after.record()
        torch.cuda.synchronize()
        found.append((before.elapsed_time(after) / 1e3, asked))
    passed, asked = zip(*found[2:], strict=True)
    return statistics.median(passed), statistics.median(asked)


if __name__ == "__main__":
    main()
