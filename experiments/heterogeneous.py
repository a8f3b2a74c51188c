"""Serves heterogeneous pairs, stock beside kvpatch on D, against one single engine.

experiments/heterogeneous.sh runs this. Exit status: 0 every pair identical with kvpatch and every
spoiled cache noticed, 1 not, 2 could not run, 128 + n stopped by signal n.
"""

from __future__ import annotations

import argparse
import sys

from experiments.engines.pairs import OPTIONS, ROWS, TILED_ROWS, choose
from experiments.engines.recorded import DATA, record, require_all
from experiments.engines.report import all_passed, show_pairs
from experiments.harness import importable_in_engines, options_of
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import require_release


def _play(asked: argparse.Namespace) -> bool:
    rows = choose(asked.rows, ROWS if asked.rows is None else (*ROWS, *TILED_ROWS))
    if asked.list:
        print(*(row.name for row in rows), sep="\n")
        return True
    if asked.write:
        require_all([row.name for row in rows if not asked.no_stock])
    require_release(asked.release)
    results = show_pairs(rows, asked, "heterogeneous", with_stock=not asked.no_stock)
    if asked.write:
        record(results)
    return all_passed(results)


def main() -> None:
    importable_in_engines()
    asked = options_of(
        __doc__,
        judged=False,
        rows=(None, "which rows, by commas; all by default"),
        no_stock=(False, "serve no row without kvpatch"),
        list=(False, "only name the rows"),
        **OPTIONS,
        write=(False, f"write {DATA.name} of the documentation anew"),
    )
    with exit_statuses():
        sys.exit(not _play(asked))


if __name__ == "__main__":
    main()
