"""Compares two workers' bytes, as `kvpatch verify --device` does."""

from __future__ import annotations

from experiments.gpu.rows import Rows, options_of
from kvpatch.tools.verify.workers import compare_workers


def main() -> None:
    """Writes a row for each pair and way."""
    options = options_of(__doc__)
    rows = Rows(options.json)
    for one in compare_workers(options.device):
        rate = one.bytes / one.seconds / 1e9
        rows.add(f"{one.pair}, {one.way}", is_right=one.is_right, gb_per_second=rate)


if __name__ == "__main__":
    main()
