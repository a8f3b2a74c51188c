"""A plan says of every cell of the lab's table what was seen there, stock and with kvpatch on D."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvpatch.core.releases import RELEASES
from kvpatch.patches import SLUGS
from kvpatch.tools.planning.arguments import Running
from kvpatch.tools.planning.ours import judged_by_kvpatch
from kvpatch.tools.planning.pair import Outcome, Pair, Request, Verdict
from kvpatch.tools.planning.stock import start_problem, stock_verdict
from tests.lab.case import Case, EngineSpec
from tests.lab.releases import declaring
from tests.lab.table import Cell, all_cases, known_cells

from .cells import PLAYED, pair_of, request_of, requests_of

pytestmark = pytest.mark.patching

CASES = {case.name: case for case in all_cases()}

#: Where the lab saw less than what becomes of other prompts: a plan speaks of all. Of 64 tokens of
#: P the first lands rightly in 0.26, with what the release does to their heads; the lab's prompts
#: of one token have no other.
LUCKY = {("0.26.0", "flash float32 P HND 64, D HND 128, 3 x 1 tokens, all but one cached")}


def _cells(release: str) -> list[Cell]:
    return [cell for cell in known_cells() if cell.release == release]


def _first_that_fails(verdicts: Iterable[Verdict]) -> Outcome:
    """What a run comes to, which ends with the first request that is not served."""
    outcomes = [verdict.outcome for verdict in verdicts]
    return next((o for o in outcomes if o is not Outcome.IDENTICAL), Outcome.IDENTICAL)


def _by_kvpatch(pair: Pair, request: Request) -> Verdict:
    return judged_by_kvpatch(pair, request).verdict


def differences(
    cells: Sequence[Cell],
    folder: Path,
    seen: Callable[[Cell], str],
    said: Callable[[Pair, Request], Verdict],
) -> dict[tuple[str, str], str]:
    """(release, case) of each cell of which a plan says something else than what was seen."""
    found = {}
    for cell in cells:
        case = CASES[cell.case]
        played = declaring(case.patched(*SLUGS, prefill=False), cell.release)
        pair = pair_of(played, cell.release, folder)
        outcome = _first_that_fails(said(pair, one) for one in requests_of(case, cell.release))
        if seen(cell) not in PLAYED[outcome]:
            found[cell.release, cell.case] = f"seen {seen(cell)}, said {outcome.value}"
    return found


def test_all_cells_are_there():
    assert Counter(cell.release for cell in known_cells()) == dict.fromkeys(RELEASES, len(CASES))


@pytest.mark.parametrize("release", RELEASES)
def test_stock_does_what_a_plan_says(release, tmp_path):
    found = differences(_cells(release), tmp_path, lambda cell: cell.stock, stock_verdict)

    assert found.keys() == {key for key in LUCKY if key[0] == release}, found


@pytest.mark.parametrize("release", RELEASES)
def test_kvpatch_does_what_a_plan_says(release, tmp_path):
    assert not differences(_cells(release), tmp_path, lambda cell: cell.kvpatch, _by_kvpatch)


@pytest.mark.parametrize("release", ["0.10.0", "0.26.0"])
def test_negative_control_every_swapped_outcome_is_noticed(release, tmp_path):
    """Each cell's outcome in turn becomes each other one."""
    another = {"identical": "corrupt", "corrupt": "identical", "refused": "identical"}
    another["failed"] = "identical"
    cells = [
        replace(cell, stock=another[cell.stock], kvpatch=another[cell.kvpatch])
        for cell in _cells(release)
        if (release, cell.case) not in LUCKY
    ]

    stock = differences(cells, tmp_path, lambda cell: cell.stock, stock_verdict)
    ours = differences(cells, tmp_path, lambda cell: cell.kvpatch, _by_kvpatch)

    assert len(stock) == len(ours) == len(cells)


def test_a_refusal_and_an_engine_that_ends_are_told_apart(tmp_path):
    """What the older lab called refused: <= 0.21 D ends over a failed load of other blocks."""
    cells = [replace(c, stock="refused") for c in _cells("0.14.0") if c.stock == "failed"]

    found = differences(cells, tmp_path, lambda cell: cell.stock, stock_verdict)

    assert len(found) == len(cells) > 20


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
    """An engine that runs has it, and does not tell this variable."""
    engine = pair_of(Case("states", _STATES, _STATES, 300), "0.33.0", tmp_path).decode
    assert start_problem(engine) is None

    bare = replace(engine, arguments=replace(engine.arguments, environment={}))
    running = replace(bare.arguments, running=Running("http://d:8000", "0.33.0"))

    problem = start_problem(bare)
    assert problem is not None and problem.cure == "set VLLM_SSM_CONV_STATE_LAYOUT=DS"
    assert start_problem(replace(bare, arguments=running)) is None


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("release", ["0.28.0", "0.30.0", "0.33.0"])
def test_states_of_other_types_are_wrong_on_stock(release: str, side: str, tmp_path: Path) -> None:
    """As the lab's test_other_types_of_states has seen; alike they are identical."""
    alike = Case("states", _STATES, _STATES, 300).patched(*SLUGS, prefill=False)
    longer = replace(getattr(alike, side), state_dtype="float32")
    request = request_of(alike)

    pair = pair_of(alike, release, tmp_path)
    assert stock_verdict(pair, request).outcome is Outcome.IDENTICAL
    assert _by_kvpatch(pair, request).outcome is Outcome.IDENTICAL

    pair = pair_of(replace(alike, **{side: longer}), release, tmp_path)
    stock, ours = stock_verdict(pair, request), _by_kvpatch(pair, request)
    assert stock.outcome is Outcome.WRONG and "--mamba-cache-dtype" in stock.cure
    assert ours.outcome is Outcome.REFUSED and "a convolution's states" in ours.reason


@pytest.mark.parametrize("says", [False, True])
def test_states_of_other_types_and_as_many_bytes(tmp_path: Path, says: bool) -> None:
    """A handshake states how many bytes there are, and not of what; P's kvpatch does."""
    alike = Case("states", _STATES, _STATES, 300).patched(*SLUGS, prefill=says)
    other = replace(alike, prefill=replace(alike.prefill, state_dtype="float16"))
    pair, request = pair_of(other, "0.33.0", tmp_path), request_of(alike)

    assert stock_verdict(pair, request).outcome is Outcome.WRONG
    assert _by_kvpatch(pair, request).outcome is (Outcome.REFUSED if says else Outcome.WRONG)


def _open(p: int, d: int) -> Case:
    """FlashInfer cuts blocks of 128 tokens in two, which no handshake of <= 0.20 says."""
    prefill, decode = (
        EngineSpec("flashinfer", "HND", tokens, 60, parts=max(1, tokens // 64)) for tokens in (p, d)
    )
    return Case(f"P {p}, D {d}", prefill, decode, 300)


@pytest.mark.parametrize(
    ("p", "d", "says", "outcome", "way"),
    [
        (128, 16, "P", Outcome.IDENTICAL, "read by kvpatch"),
        (128, 16, "D", Outcome.IDENTICAL, "read by kvpatch"),
        (128, 16, "", Outcome.REFUSED, "refused"),
        (64, 64, "P", Outcome.IDENTICAL, "vLLM's own"),
        (64, 64, "", Outcome.IDENTICAL, "vLLM's own"),
        (128, 64, "P", Outcome.IDENTICAL, "read by kvpatch"),
    ],
)
@pytest.mark.parametrize("release", ["0.14.1", "0.20.2"])
def test_what_a_handshake_leaves_open(
    release: str, p: int, d: int, says: str, outcome: Outcome, way: str, tmp_path: Path
) -> None:
    case = _open(p, d).patched(*SLUGS, prefill=says == "P")
    if says == "D":
        case = declaring(case, release)

    found = judged_by_kvpatch(pair_of(case, release, tmp_path), request_of(case))

    assert (found.verdict.outcome, found.way) == (outcome, way), found.verdict
    assert ("KVPATCH_PEER_BLOCK_SIZE" in found.verdict.cure) is (outcome is Outcome.REFUSED)


@pytest.mark.parametrize("declared", ["", "64"])
def test_a_p_that_looks_like_d_is_wrong(declared: str, tmp_path: Path) -> None:
    """Known: vLLM reads it, with a warning or declared as what it is not."""
    case = _open(128, 64).patched(*SLUGS, prefill=False)
    if declared:
        said = replace(case.decode, settings=(("KVPATCH_PEER_BLOCK_SIZE", declared),))
        case = replace(case, decode=said)

    found = judged_by_kvpatch(pair_of(case, "0.20.2", tmp_path), Request(40))

    assert found.verdict.outcome is Outcome.WRONG, found


def test_a_wrong_declaration_is_wrong(tmp_path: Path) -> None:
    case = _open(128, 16).patched(*SLUGS, prefill=False)
    said = replace(case.decode, settings=(("KVPATCH_PEER_BLOCK_SIZE", "64"),))

    found = judged_by_kvpatch(
        pair_of(replace(case, decode=said), "0.20.2", tmp_path), request_of(case)
    )

    assert found.verdict.outcome is Outcome.WRONG, found
    assert "KVPATCH_PEER_BLOCK_SIZE on D" in found.verdict.reason
