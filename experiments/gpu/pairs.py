"""Plays real connectors of one release with caches on the device: stock, kvpatch, a flipped bit."""

from __future__ import annotations

import os

from experiments.gpu.rows import Rows, options_of
from kvpatch.patches import SLUGS
from tests.lab import far_memory
from tests.lab.host import Lab
from tests.lab.test_gpu import BUFFERED, LIKE, PAIRS


def main() -> None:
    """Writes a row for each pair; `is_right` if it is what it has to be."""
    options = options_of(__doc__, release="0.33.0")
    os.environ[far_memory.MEMORY] = far_memory.GPU if options.device == "cuda" else far_memory.COPY
    rows = Rows(options.json)
    with Lab(options.release) as lab:
        for name, case in PAIRS.items():
            played = case if name in BUFFERED else case.patched(*SLUGS)
            stock = "" if name in BUFFERED else lab.run(case.stock()).outcome
            report = lab.run(played)
            rows.add(
                f"{options.release}: {name}",
                stock=stock,
                kvpatch=report.outcome,
                flipped=report.noticed.get("a flipped bit", 0),
                is_right=report.outcome == "identical"
                and (name not in LIKE or stock == "identical"),
                detail=report.detail[:600],
            )


if __name__ == "__main__":
    main()
