"""Brings what a benchmark has written with --json into the documentation.

    python experiments/publish_benchmark.py transfer transfer.json --note "Nothing ran beside it."

Writes docs/data/NAME.json, with today's date and this commit, and docs/pictures/NAME.png where
there is one; then `python -m tests.contract --pages` brings the table onto its page. Needs
matplotlib. Several files of one benchmark are taken together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmark_pictures import PICTURES
from benchmark_tables import TABLES

from tests.played import write_table

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_SERVED = "0.32.0"
#: Those that start vLLM's engines.
_SCRIPTS = {
    "serving": "experiments/bench_serving.sh",
    "drill": "experiments/drill.sh",
}


def write(name: str, raw: Any, note: str) -> None:
    """The data, in the form of all of docs/data, and the picture."""
    made = TABLES[name](raw)
    made_by = _SCRIPTS.get(name)
    write_table(
        _DOCS / "data" / f"{name}.json",
        made_by or f"experiments/bench_{name}.py",
        _SERVED if made_by else "",
        note,
        *made,
    )
    if name in PICTURES:
        PICTURES[name](raw, _DOCS / "pictures" / f"{name}.png")


def main() -> None:
    """Reads, and writes both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(TABLES))
    parser.add_argument("raw", type=Path, nargs="+", help="what the benchmark's --json wrote")
    parser.add_argument("--note", required=True, help="the machine, and what ran beside it")
    options = parser.parse_args()
    found = [json.loads(path.read_text()) for path in options.raw]
    raw = found[0] if len(found) == 1 else [row for rows in found for row in rows]
    write(options.name, raw, options.note)


if __name__ == "__main__":
    main()
