"""A run's outcome as a table for people and as JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpatch.tools.verify.compare import CaseVerdict, SetupComparison
from kvpatch.tools.verify.prompts import Case

if TYPE_CHECKING:
    from rich.table import Table

_SAME = "identical"


def json_lines(comparison: SetupComparison) -> list[dict[str, Any]]:
    """One record per case: what each set-up answered, its fingerprints, and the verdict."""
    return [
        {
            "case": case.name,
            "prompt_tokens": case.tokens,
            "prompt_token_ids": list(case.token_ids),
            "step": case.step,
            "control": case.control,
            "reference": comparison.reference,
            "setups": {
                setup: {
                    **asdict(by_case[case.name]),
                    "verdict": _verdict_record(comparison, setup, case),
                }
                for setup, by_case in comparison.observations.items()
                if case.name in by_case
            },
        }
        for case in comparison.cases
    ]


def write_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _verdict_record(comparison: SetupComparison, setup: str, case: Case) -> dict[str, Any] | None:
    verdicts = comparison.control if case.control else comparison.verdicts
    verdict = verdicts.get(setup, {}).get(case.name)
    return None if verdict is None else {**asdict(verdict), "identical": verdict.identical}


def table(comparison: SetupComparison, control: bool = False) -> Table:
    """A row per prompt; per set-up its tokens, and its cache from prefill to decode."""
    from rich.table import Table

    verdicts = comparison.control if control else comparison.verdicts
    title = (
        "negative control: one block of the decode engine's cache is spoiled"
        if control
        else "equivalence"
    )
    drawn = Table(title=f"{title} (reference: {comparison.reference})", title_justify="left")
    drawn.add_column("prompt", no_wrap=True)
    drawn.add_column("tokens", justify="right")
    for setup in verdicts:
        drawn.add_column(f"{setup}: tokens")
        drawn.add_column(f"{setup}: cache")
    for case in comparison.cases:
        if case.control is not control:
            continue
        cells: list[str] = []
        for by_case in verdicts.values():
            verdict = by_case.get(case.name)
            cells += (
                ["not run", "not run"]
                if verdict is None
                else _cells(verdict, expected_same=not control)
            )
        drawn.add_row(case.name, str(case.tokens), *cells)
    return drawn


def _cells(verdict: CaseVerdict, expected_same: bool) -> list[str]:
    cache = "; ".join(
        f"{what}: {problem}"
        for what, problem in (("prefill", verdict.prefill), ("transfer", verdict.transfer))
        if problem
    )
    return [_coloured(verdict.tokens, expected_same), _coloured(cache, expected_same)]


def _coloured(problem: str, expected_same: bool) -> str:
    from rich.markup import escape

    colour = "green" if (not problem) is expected_same else "red"
    return f"[{colour}]{escape(problem or _SAME)}[/{colour}]"


def errors(comparison: SetupComparison) -> list[str]:
    """Returns each answer of failed requests once, with its first set-up and case."""
    found: dict[str, str] = {}
    for setup, by_case in comparison.observations.items():
        for case, observation in by_case.items():
            if observation.error:
                found.setdefault(f"{setup}: {observation.error}", f"{setup}/{case}")
    return [f"{where}: {text.partition(': ')[2]}" for text, where in found.items()]


def summary(comparison: SetupComparison) -> list[str]:
    """Returns the conclusions, a line each."""
    compared = sum(len(by_case) for by_case in comparison.verdicts.values())
    lines: list[str] = []
    if not compared:
        lines.append("nothing was compared")
    elif comparison.differences:
        lines.append(
            f"{len(comparison.differences)} of {compared} differ: "
            f"{', '.join(comparison.differences)}"
        )
    else:
        lines.append(
            f"all {compared} identical to {comparison.reference}: tokens, and caches "
            "from prefill to decode"
        )
    controls = sum(len(by_case) for by_case in comparison.control.values())
    if comparison.control_failures:
        lines.append(f"negative control: NOT NOTICED for {', '.join(comparison.control_failures)}")
    elif controls:
        lines.append(f"negative control: differs (as it must), {controls} of {controls}")
    else:
        lines.append("negative control: not run")
    return lines
