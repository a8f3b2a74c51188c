"""Stock does with real connectors what ``kvpatch plan`` says of pairs that no table has.

Unlike backends, data types and ranks, blocks that are cut otherwise, prefix hits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.tools.planning.verdicts import Outcome, verdicts
from tests.planning.cells import PLAYED, pair_of

from .case import Case, EngineSpec, Family
from .host import Lab
from .stage import Raised, Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(cache_shape="packed")]


def _engine(family: Family = "flash", **changes: Any) -> EngineSpec:
    changes = {"layout": "HND", "block_tokens": 32, "dtype": "float32", **changes}
    return EngineSpec(family, planned_blocks=16, **changes)


def _both(family: Family = "flash", **changes: Any) -> Any:
    return lambda **more: _engine(family, **{**changes, **more})


_NHD, _LATENTS = _both(layout="NHD"), _both("mla", layout="NHD", block_tokens=64)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("like, with a hit", _engine(), _engine(), 150, 32),
        Case("other layouts", _engine(), _NHD(), 150, 32),
        Case("other backends", _engine(), _engine("flashinfer"), 150),
        Case("other cache types", _engine(dtype="fp8"), _engine(dtype="bfloat16"), 150),
        Case("1 and 2 ranks", _engine(), _engine(tp_size=2), 150),
        Case("2 and 1 ranks", _engine(tp_size=2), _engine(), 150),
        Case("1 and 2 ranks in NHD", _NHD(), _NHD(tp_size=2), 150),
        Case("1 and 2 ranks of Triton", _engine("triton"), _engine("triton", tp_size=2), 150),
        Case("1 and 2 ranks of latents", _LATENTS(), _LATENTS(tp_size=2), 150),
        Case("4 and 8 ranks of 4 heads", _engine(tp_size=4), _engine(tp_size=8), 150),
        Case("4 and 2 ranks of 4 heads", _engine(tp_size=4), _engine(tp_size=2), 150),
        Case("32 and 64, behind a hit", _engine(), _engine(block_tokens=64), 150, 64),
        Case("32 and 64, a hit and whole blocks", _engine(), _engine(block_tokens=64), 192, 64),
        Case("latents of 32 and 64", _LATENTS(block_tokens=32), _LATENTS(), 150),
        Case("32 and 64 of Triton", _engine("triton"), _engine("triton", block_tokens=64), 150),
        Case(
            "128 in two and 64",
            _engine("flashinfer", block_tokens=128, parts=2),
            _engine("flashinfer", block_tokens=64),
            150,
        ),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_stock_does_what_a_plan_says(lab: Lab, name: str, tmp_path: Path) -> None:
    _same(lab, CASES[name], tmp_path)


@pytest.mark.parametrize("name", ["blocks", "layouts"])
def test_a_refused_load_of_several_cache_groups(lab: Lab, name: str, tmp_path: Path) -> None:
    """<= 0.29 its request is answered from blocks that nobody filled; with kvpatch it is read."""
    changes: dict[str, Any] = {"block_tokens": 48} if name == "blocks" else {"layout": "NHD"}
    windows = replace(_engine(window_tokens=(0, 40)), planned_blocks=48)
    case = Case(f"windows, other {name}", replace(windows, **changes), windows, 150)

    _same(lab, case, tmp_path)
    lab.on_d(case).must_be("identical")


def _hybrid(ranks: int, kind: str, block_tokens: int) -> EngineSpec:
    return replace(
        _engine(block_tokens=block_tokens, tp_size=ranks),
        planned_blocks=48,
        layers=4,
        has_state=True,
        state_kind=kind,
    )


@pytest.mark.parametrize("kind", ["mamba2", "mamba2, one group"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
@pytest.mark.parametrize("tokens", [(32, 32), (64, 32), (32, 64)])
def test_hybrid_models_over_unlike_ranks(
    lab: Lab, tokens: tuple[int, int], ranks: tuple[int, int], kind: str, tmp_path: Path
) -> None:
    sides = (_hybrid(r, kind, size) for r, size in zip(ranks, tokens, strict=True))
    case = Case(f"{kind}, {ranks} ranks, {tokens} tokens", *sides, 150)
    _, judged = verdicts(pair_of(case, lab.release, tmp_path))

    seen = lab.on_d(case)

    if FACTS[lab.release].joins_in_groups and ranks == (2, 1) and tokens == (32, 64):
        _ends_at_the_next(lab, case, tmp_path)
    else:
        _same(lab, case, tmp_path)
    assert judged.outcome is Outcome.IDENTICAL, judged
    seen.must_be("identical")


def _ends_at_the_next(lab: Lab, case: Case, folder: Path) -> None:
    """Stock refuses the first request's handshake half-way, and takes the next one for done."""
    said, _ = verdicts(pair_of(case, lab.release, folder))
    is_told = not FACTS[lab.release].loses_failed_groups

    assert _one_by_one(lab, case) == ["failed" if is_told else "received", "IndexError"]
    assert said.outcome is (Outcome.REFUSED if is_told else Outcome.WRONG)


@pytest.mark.on(joins_in_groups=True)  # else: an earlier check refuses hybrid models' blocks
@pytest.mark.parametrize("window", [0, 40])
def test_a_refusal_of_other_models_leaves_nothing_behind(
    lab: Lab, window: int, tmp_path: Path
) -> None:
    """P's ranks and blocks are refused as for hybrid models; the engine goes on."""
    p, d = (
        replace(_engine(tp_size=r, block_tokens=n, window_tokens=(0, window)), planned_blocks=48)
        for r, n in ((2, 32), (1, 64))
    )
    case = Case(f"2 and 1 ranks, 32 and 64, a window of {window}", p, d, 150)
    said, _ = verdicts(pair_of(case, lab.release, tmp_path))
    is_lost = bool(window) and FACTS[lab.release].loses_failed_groups

    assert _one_by_one(lab, case) == ["received" if is_lost else "failed"] * 2
    assert said.outcome is (Outcome.WRONG if is_lost else Outcome.REFUSED)


def _one_by_one(lab: Lab, case: Case) -> list[str]:
    """What becomes of two requests, the second after the first's end; an exception ends D."""
    case, found = case.stock(), []
    with Stage(lab) as stage:
        prefill, decode = stage.start(case.prefill), stage.start(case.decode)
        for prompt in stage.prompts(2, case.prompt_tokens):
            try:
                decode.ask(*prefill.compute(prompt))
                seen = decode.watch(prompt)
            except Raised as error:
                return [*found, error.failure.kind]
            found.append("received" if seen.received else "failed" if seen.failed else "lost")
    return found


def _same(lab: Lab, case: Case, folder: Path) -> None:
    said, _ = verdicts(pair_of(case, lab.release, folder))

    seen = lab.run(case.stock())

    is_joined = case.prefill.block_tokens < case.decode.block_tokens
    is_lucky = said.outcome is Outcome.WRONG and seen.outcome == "identical" and is_joined
    assert seen.outcome in PLAYED[said.outcome] or is_lucky, f"{said}; {seen}"
