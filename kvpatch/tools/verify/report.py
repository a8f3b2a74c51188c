"""A run's outcome in sentences for people and as JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpatch.tools.verify.compare import SetupComparison
from kvpatch.tools.verify.prompts import Case


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


def differences(comparison: SetupComparison) -> list[str]:
    """Returns a line for each prompt that differs though it must not."""
    return [
        f"{setup}/{case}: "
        + "; ".join(f"{what}: {said}" for what, said in asdict(verdict).items() if said)
        for setup, by_case in comparison.verdicts.items()
        for case, verdict in by_case.items()
        if not verdict.identical
    ]


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
