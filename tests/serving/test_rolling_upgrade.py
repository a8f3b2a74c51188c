"""What a rolling upgrade plays and counts, with stand-ins for engines (no vLLM)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpatch.core.errors import BadOptions

pytest.importorskip("httpx", reason="httpx is not installed")

from experiments import rolling_upgrade  # noqa: E402
from experiments.engines.routed import Prompt  # noqa: E402
from experiments.rolling_upgrade import Phase, Run  # noqa: E402

pytestmark = pytest.mark.serving

_PROMPT = Prompt((1, 2), (3,))
_RUN = Run("1.0", "2.0", "P first", "beside", True, "model")
_PHASE = Phase(
    engines="kvpatch on D",
    old="1.0",
    new="2.0",
    order="P first",
    way="beside",
    between="1.0 → 1.0",
    requests=8,
    right=8,
    wrong=0,
    failed_at_p=0,
    failed_at_d=0,
    broken_at_p=0,
    broken_at_d=0,
    no_answer=0,
    said={},
    reads=8,
)


def _missed(*rows: Phase) -> list[str]:
    return [goal.name for goal in rolling_upgrade.goals(rows) if not goal.is_met]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"wrong": 1}, ["P first, beside, 1.0 → 1.0: wrong answers"]),
        ({"no_answer": 1}, ["P first, beside, 1.0 → 1.0: without an answer"]),
        ({"failed_at_d": 1}, ["P first, beside, 1.0 → 1.0: failures"]),
        ({"reads": 7}, ["P first, beside: reads for 8 answers"]),
        ({"way": "killed", "between": "P is replaced, 1.0 → 1.0", "broken_at_p": 8}, []),
    ],
)
def test_what_must_be_so_with_kvpatch(changes: dict[str, Any], missed: list[str]) -> None:
    assert _missed(replace(_PHASE, **changes)) == missed


def test_a_stock_fleet_that_takes_no_harm_has_tried_nothing() -> None:
    unharmed = replace(_PHASE, engines="stock")

    assert _missed(unharmed) == ["stock: wrong or failed at D"]
    assert _missed(replace(unharmed, failed_at_d=1)) == []


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(BadOptions, match="--ways: expected some of beside, killed, found 'none'"):
        rolling_upgrade.chosen("none", rolling_upgrade.WAYS, "--ways")
