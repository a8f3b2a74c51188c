"""A plan says of every pair of real engines' tables what they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.engines.pairs import ROWS, Row, Side
from experiments.engines.recorded import HYBRID_RANKS, TITLES
from kvpatch.tools.planning.engine import Pair
from kvpatch.tools.planning.verdicts import Outcome, verdicts
from tests.lab.case import Case, EngineSpec

from .cells import pair_of

pytestmark = pytest.mark.patching

_FOLDER = Path(__file__).parents[2] / "docs" / "data"
DATA = json.loads((_FOLDER / "engines.json").read_text())
RANKS = json.loads((_FOLDER / "hybrid_ranks.json").read_text())
_SHOWN = {**TITLES, **HYBRID_RANKS}
SEEN = {title: (stock, ours) for title, stock, ours in (*DATA["rows"], *RANKS["rows"])}
PAIRS = {row.name: row for row in ROWS if row.name in _SHOWN}

_FAIL, _WRONG = "fail", "wrong tokens"


def _spec(row: Row, side: Side) -> EngineSpec:
    """As experiments/engines/models.py makes the models."""
    return EngineSpec(
        # The project's own attention in torch keeps rows, as FlashAttention does.
        family="flash" if row.single.torch_attention else "cpu",
        layout=side.layout or "HND",
        block_tokens=side.block_tokens,
        planned_blocks=48,
        dtype="float32",
        layers=4,
        kv_heads=4,
        head_dim=32,
        tp_size=side.ranks,
        window_tokens=(40, 0) if row.single.model == "window" else (0,),
        has_state=row.single.model == "hybrid",
        state_kind="mamba2, one group",
    )


def _pairs(row: Row, folder: Path) -> list[Pair]:
    cases = (Case(row.name, _spec(row, side), _spec(row, row.decode)) for side in row.prefill)
    return [pair_of(case, DATA["release"], folder, device="cpu") for case in cases]


def _said_of_stock(row: Row, folder: Path) -> set[str]:
    """The table's words for the verdicts on the row's pairs."""
    words = {Outcome.REFUSED: _FAIL, Outcome.WRONG: _WRONG, Outcome.IDENTICAL: "identical"}
    return {words[verdicts(pair)[0].outcome] for pair in _pairs(row, folder)}


def _seen(text: str) -> set[str]:
    """A plan says of an engine that ends that it refuses."""
    text = text.replace("D ends", _FAIL)
    return {word for word in (_FAIL, _WRONG, "identical") if word in text}


def test_the_table_has_pairs():
    assert {_SHOWN[name] for name in PAIRS} == set(SEEN)
    assert DATA["release"] == RANKS["release"]


@pytest.mark.parametrize("name", PAIRS)
def test_stock_does_what_a_plan_says(name, tmp_path):
    assert _said_of_stock(PAIRS[name], tmp_path) == _seen(SEEN[_SHOWN[name]][0])


@pytest.mark.parametrize("name", PAIRS)
def test_kvpatch_does_what_a_plan_says(name, tmp_path):
    """And on whose path."""
    on_stocks_path = "stock's path" in SEEN[_SHOWN[name]][1]
    for pair in _pairs(PAIRS[name], tmp_path):
        _, found = verdicts(pair)
        assert found.outcome is Outcome.IDENTICAL, found
        assert (found.way == "vLLM's own") == on_stocks_path


def test_negative_control_a_row_of_another_pair_is_noticed(tmp_path):
    said = {name: _said_of_stock(row, tmp_path) for name, row in PAIRS.items()}

    assert said["128-32"] != _seen(SEEN[_SHOWN["32-128"]][0])
    assert said["64-64"] != _seen(SEEN[_SHOWN["128-32"]][0])
    assert said["2p1d"] != _seen(SEEN[_SHOWN["128-32"]][0])
