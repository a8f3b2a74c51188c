"""A plan says of every cell of the lab's table the outcome that was seen there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import pytest

from kvpatch.core.errors import BadOptions
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.patches import SLUGS
from kvpatch.tools.planning.engine import Pair
from kvpatch.tools.planning.verdicts import Outcome, start_problems, verdicts
from tests.lab.case import Case, EngineSpec
from tests.lab.releases import declaring
from tests.lab.table import Cell, all_cases, known_cells

from .cells import PLAYED, pair_of

pytestmark = pytest.mark.patching

#: Of older ones a plan says nothing.
PLANNED = [name for name, facts in FACTS.items() if facts.cache_shape == "packed"]
Side = Literal["stock", "kvpatch"]
#: In the order of a plan's verdicts.
SIDES = get_args(Side)
CASES = {case.name: case for case in all_cases()}


def _cells(release: str) -> list[Cell]:
    return [cell for cell in known_cells() if cell.release == release]


def _is_joined(pair: Pair) -> bool:
    """True if vLLM itself joins P's smaller blocks: prompts without a prefix hit are identical."""
    p, d = pair.sides
    return p.kernel_tokens < d.kernel_tokens


def differences(cells: Sequence[Cell], folder: Path, side: Side) -> dict[tuple[str, str], str]:
    """(release, case) of each cell of which a plan says something else than what was seen.

    A plan's verdict is on the worst of all prompts, and a cell is one prompt: of blocks that vLLM
    joins, a cell may be identical where the plan has wrong tokens.
    """
    found = {}
    for cell in cells:
        case = CASES[cell.case]
        played = declaring(case.patched(*SLUGS, prefill=False), cell.release)
        pair = pair_of(played, cell.release, folder)
        seen, outcome = getattr(cell, side), verdicts(pair)[SIDES.index(side)].outcome
        is_lucky = outcome is Outcome.WRONG and seen == "identical" and _is_joined(pair)
        if seen not in PLAYED[outcome] and not is_lucky:
            found[cell.release, cell.case] = f"seen {seen}, said {outcome.value}"
    return found


def test_all_cells_are_there():
    assert Counter(cell.release for cell in known_cells()) == dict.fromkeys(RELEASES, len(CASES))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("release", PLANNED)
def test_a_plan_says_what_was_seen(release, side, tmp_path):
    assert not differences(_cells(release), tmp_path, side)


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_negative_control_every_swapped_outcome_is_noticed(release, tmp_path):
    """Each cell's outcome in turn becomes another one; lucky cells may be either."""
    another = {"identical": "corrupt", "corrupt": "refused", "refused": "identical"}
    another["failed"] = "identical"
    cells = [
        replace(cell, stock=another[cell.stock], kvpatch=another[cell.kvpatch])
        for cell in _cells(release)
        if cell.stock != "identical"
    ]

    found = [differences(cells, tmp_path, side) for side in SIDES]

    assert len(found[0]) == len(found[1]) == len(cells) > 20


def test_few_cells_are_lucky(tmp_path):
    """All others have the very outcome that is said."""
    lucky = [
        cell
        for cell in known_cells()
        if cell.stock == "identical" and cell.release in PLANNED
        if verdicts(pair_of(CASES[cell.case], cell.release, tmp_path))[0].outcome is Outcome.WRONG
    ]

    assert 0 < len(lucky) < 40


_STATES = EngineSpec(
    layout="HND",
    block_tokens=32,
    planned_blocks=48,
    layers=4,
    kv_heads=4,
    head_dim=32,
    has_state=True,
    state_kind="mamba2",
)


def test_states_need_a_layout_that_vllm_asserts(tmp_path: Path) -> None:
    engine = pair_of(Case("states", _STATES, _STATES, 300), "0.33.0", tmp_path).decode
    assert not list(start_problems(engine))

    bare = replace(engine, arguments=replace(engine.arguments, environment={}))

    ((_, cure),) = start_problems(bare)
    assert cure == "set VLLM_SSM_CONV_STATE_LAYOUT=DS"


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("release", ["0.28.0", "0.30.0", "0.33.0"])
def test_states_of_other_types_are_wrong_on_stock(release: str, side: str, tmp_path: Path) -> None:
    """As the lab's test_other_types_of_states has seen; alike they are identical."""
    alike = Case("states", _STATES, _STATES, 300).patched(*SLUGS, prefill=False)
    longer = replace(getattr(alike, side), state_dtype="float32")

    found = verdicts(pair_of(alike, release, tmp_path))
    assert [one.outcome for one in found] == [Outcome.IDENTICAL] * 2

    stock, ours = verdicts(pair_of(replace(alike, **{side: longer}), release, tmp_path))
    assert stock.outcome is Outcome.WRONG and "--mamba-cache-dtype" in stock.cure
    assert ours.outcome is Outcome.REFUSED and "a convolution's states" in ours.reason


@pytest.mark.parametrize("says", [False, True])
def test_states_of_other_types_and_as_many_bytes(tmp_path: Path, says: bool) -> None:
    """A handshake states the bytes of states and not their types; P's kvpatch states them."""
    alike = Case("states", _STATES, _STATES, 300).patched(*SLUGS, prefill=says)
    other = replace(alike, prefill=replace(alike.prefill, state_dtype="float16"))

    stock, ours = verdicts(pair_of(other, "0.33.0", tmp_path))

    assert stock.outcome is Outcome.WRONG
    assert ours.outcome is (Outcome.REFUSED if says else Outcome.WRONG)


def test_an_older_release_is_status_2(tmp_path: Path) -> None:
    case = CASES["cpu float32 P 128, D 32"]

    with pytest.raises(BadOptions, match=r"vLLM 0\.25\.1, which is before 0\.26\.0"):
        pair_of(case, "0.25.1", tmp_path)
