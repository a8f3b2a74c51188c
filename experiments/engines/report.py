"""A run of pairs as people see it, a line per row and a table, and as JSON lines for programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from experiments.engines.run import RowResult, run_pairs
from experiments.harness import console_of, table_of, work_folder
from kvpatch.tools.verify.compare import (
    NULL_BLOCK,
    CaseVerdict,
    SetupComparison,
    Snapshot,
    errors,
    json_lines,
    write_json_lines,
)
from kvpatch.tools.verify.engine import Options
from kvpatch.tools.verify.model import Case
from kvpatch.tools.verify.run import until_signal

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.engines.pairs import Row


def pairs_table(results: Sequence[RowResult]) -> Table:
    """Draws a row for each pair; prefix hits are of each shared prefix."""
    shown = []
    for result in results:
        stock, ours = (
            list(result.comparison.verdicts.get(setup, {}).values())
            for setup in ("stock", "kvpatch")
        )
        spoiled = len(result.comparison.control.get("kvpatch", {}))
        # With state prefix caching is off, and blocks are used again.
        hits = [] if result.row.single.has_state else prefix_hits(result.comparison)
        shown.append([
            result.row.name, str(result.row), tokens_cell(stock), tokens_cell(ours),
            cache_cell(ours), f"{spoiled - len(result.unnoticed)}/{spoiled}",
            "+".join(map(str, hits)) or "-",
        ])  # fmt: skip
    columns = ("row", "blocks at P -> D", "stock", "kvpatch", "cache bytes",
               "spoiled and noticed", "prefix hits, blocks of D's own")  # fmt: skip
    return table_of("heterogeneous pairs, held against one single engine", columns, shown, texts=6)


def row_line(result: RowResult) -> str:
    """One row in one line, for while the others are still to come."""
    cells = [
        f"{setup} {tokens_cell(list(by_case.values()))}"
        for setup, by_case in result.comparison.verdicts.items()
    ]
    return f"{result.row.name} ({result.row}): {', '.join(cells)}"


def tokens_cell(verdicts: Sequence[CaseVerdict]) -> str:
    """Tells if a set-up's tokens are identical, or how many are wrong or failed."""
    if not verdicts:
        return "not run"
    failed = sum(verdict.tokens == "failed" for verdict in verdicts)
    wrong = sum(bool(verdict.tokens) for verdict in verdicts) - failed
    of = f"of {len(verdicts)} "
    found = [f"{failed} {of}fail"] * bool(failed)
    found += [f"{wrong} {'' if failed else of}wrong tokens, HTTP 200"] * bool(wrong)
    return ", ".join(found) or "identical"


def cache_cell(verdicts: Sequence[CaseVerdict]) -> str:
    """Tells if the decode engine's caches have the prefill engine's bytes."""
    if not verdicts:
        return "not run"
    wrong = sum(bool(verdict.transfer or verdict.prefill) for verdict in verdicts)
    return f"wrong {wrong}/{len(verdicts)}" if wrong else "identical"


def prefix_hits(comparison: SetupComparison) -> list[int]:
    """For each pair of prompts with a shared prefix, how many blocks the later one found on D."""
    cases, found = comparison.cases, comparison.observations["kvpatch"]
    hits = []
    for pair in prefix_pairs(cases):
        caches = [found[case.name].decode for case in pair if case.name in found]
        if len(caches) == 2 and caches[0] is not None and caches[1] is not None:
            hits.append(prefix_hit_blocks(caches[0], caches[1]))
    return hits


def prefix_pairs(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """The pairs of prompts that share a prefix, first the one that is sent first."""
    shared = [case for case in cases if case.name.startswith("prefix-")]
    return list(zip(shared[::2], shared[1::2], strict=True))


def prefix_hit_blocks(earlier: Snapshot, later: Snapshot) -> int:
    """How many of its first blocks a request shares with an earlier one, in its longest group."""
    return max(
        (
            sum(1 for _ in takewhile(_is_shared, zip(*groups, strict=False)))
            for groups in zip(earlier.block_ids, later.block_ids, strict=True)
        ),
        default=0,
    )


def _is_shared(blocks: tuple[int, int]) -> bool:
    return blocks[0] == blocks[1] != NULL_BLOCK


def problems(results: Sequence[RowResult]) -> list[str]:
    """Why rows did not pass and what stock engines answered, a line each."""
    lines = []
    for result in results:
        name = result.row.name
        if result.failure:
            lines.append(f"{name}: {result.failure}")
        lines += [f"{name}: {line}" for line in errors(result.comparison)]
        lines += [f"{name}: {setup}: {reason}" for setup, reason in result.reasons.items()]
        ours = [d for d in result.comparison.differences if d.startswith("kvpatch/")]
        if ours:
            lines.append(f"{name}: differ: {', '.join(ours)}")
    return lines


def pairs_summary(results: Sequence[RowResult]) -> str:
    passed = sum(result.passed for result in results)
    spoiled = sum(len(result.comparison.control.get("kvpatch", {})) for result in results)
    return (
        f"{passed} of {len(results)} pairs identical with kvpatch; "
        f"negative control: {spoiled} prompts spoiled"
    )


def show_pairs(
    rows: Sequence[Row], asked: argparse.Namespace, name: str, *, with_stock: bool
) -> list[RowResult]:
    """Runs the rows, and shows what came of them.

    Args:
        asked: by pairs.OPTIONS.
        name: of the file of results in the options' folder, which is written after each row.

    Raises:
        Interrupted: by a signal; every engine has been stopped.
    """
    console = console_of(160)
    options = Options(
        work_dir=work_folder(asked.work_dir, name, console),
        max_tokens=asked.max_tokens,
        startup_timeout=asked.startup_timeout,
    )
    results = options.work_dir / f"{name}.jsonl"
    finished: list[RowResult] = []

    def report(result: RowResult) -> None:
        finished.append(result)
        records = (
            {"row": one.row.name, "passed": one.passed, **record}
            for one in finished
            for record in json_lines(one.comparison)
        )
        write_json_lines(results, list(records))
        console.print(row_line(result), markup=False, soft_wrap=True, highlight=False)

    until_signal(run_pairs(rows, options, console, report, with_stock=with_stock))
    console.rule()
    console.print(pairs_table(finished))
    for line in (*problems(finished), pairs_summary(finished)):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    console.print(f"one JSON line per pair and prompt: {results}", soft_wrap=True, highlight=False)
    return finished


def all_passed(results: Sequence[RowResult]) -> bool:
    """True if every pair was identical and every spoiled cache noticed."""
    return bool(results) and all(result.passed for result in results)
