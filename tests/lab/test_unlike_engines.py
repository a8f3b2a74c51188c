"""D reads from a P of another block size or layout, with kvpatch on D alone."""

from __future__ import annotations

import pytest

from kvpatch.patches import SLUGS

from .case import Case, EngineSpec, Sabotage
from .cases import pair
from .host import Lab
from .releases import (
    has_named_layouts,
    is_full,
    moves_full_blocks_only,
    states_block_size,
    states_kernel_blocks,
)
from .test_like_pairs import tokens_to_move
from .unlike import Dimensions, cases

pytestmark = pytest.mark.lab

SEED = 20
_CASES = {case.name: case for case in cases(Dimensions(), SEED, full=is_full())}


@pytest.mark.parametrize("name", _CASES)
def test_unlike_pair_is_identical(lab: Lab, name: str) -> None:
    case = _CASES[name]
    if moves_full_blocks_only(lab.release) and case.prefill.layout != case.decode.layout:
        pytest.skip("0.10.0 does not state its layout: a limit that PATCHES.md names")
    report = lab.run(case.patched(*SLUGS, prefill=False))

    if is_out_of_reach(case, lab.release):
        # With nothing to move, all that is left undone is to tell P.
        assert report.outcome in ("refused", "failed") or not report.moved_tokens, report
        return
    assert report.outcome == "identical", report
    assert report.moved_tokens == tokens_to_move(case, lab.release)


def is_out_of_reach(case: Case, release: str) -> bool:
    """Where the handshake does not state what a copy needs to know, it is refused."""
    if not states_block_size(release):
        return case.decode.block_tokens != case.prefill.block_tokens
    return not states_kernel_blocks(release) and case.decode.family in ("flashinfer", "mla")


def _pair(family="flash", p=32, d=64, p_layout="HND", d_layout="HND", p_tp=1, d_tp=1) -> Case:
    common = {"planned_blocks": 16, "dtype": "float32"}
    prefill = EngineSpec(family, p_layout, block_tokens=p, tp_size=p_tp, **common)
    decode = EngineSpec(family, d_layout, block_tokens=d, tp_size=d_tp, **common)
    return Case(f"{family} {p_layout} {p} to {d_layout} {d}", prefill, decode, prompt_tokens=150)


@pytest.mark.parametrize("sabotage", ["shift_block", "skip_layer", "flip_byte"])
def test_a_spoilt_cache_is_noticed(lab: Lab, sabotage: Sabotage) -> None:
    like = Case("like", *pair(EngineSpec(layout="HND")), prompt_tokens=70)
    case = _pair() if states_block_size(lab.release) else like
    report = lab.run(case.patched(*SLUGS, prefill=False), sabotage=sabotage)

    assert report.outcome == "corrupt", report
    assert report.wrong_elements > 0


@pytest.mark.parametrize(("p", "d"), [(128, 32), (32, 128), (96, 64)])
def test_the_cpu_backends_keys_by_column(lab: Lab, p: int, d: int) -> None:
    like = lab.run(Case("like", *pair(EngineSpec("cpu", block_tokens=d, dtype="float32"))))
    if like.outcome != "identical":
        pytest.skip(f"this release serves no P/D on its CPU backend: {like.detail[:80]}")

    report = lab.run(_pair("cpu", p, d).patched(*SLUGS, prefill=False))

    assert report.outcome == "identical", report


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_unlike_ranks(lab: Lab, p_tp: int, d_tp: int, layout: str) -> None:
    """Heads are split by the plan, in NHD too, where stock refuses or goes wrong."""
    like = lab.run(_pair(p=64, d=64, p_tp=p_tp, d_tp=d_tp))
    if like.outcome != "identical":
        pytest.skip(f"this release serves no such ranks at all: {like.detail[:80]}")
    if not states_block_size(lab.release):
        pytest.skip("this release does not state its block size: a limit that PATCHES.md names")

    report = lab.run(
        _pair(p_layout=layout, d_layout=layout, p_tp=p_tp, d_tp=d_tp).patched(*SLUGS, prefill=False)
    )

    assert report.outcome == "identical", report


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_other_named_layouts(lab: Lab, layout: str) -> None:
    """On one side each; test_named_layouts.py has them in all combinations."""
    if not has_named_layouts(lab.release):
        pytest.skip("this release has no such layout")
    for case in (_pair(p_layout=layout), _pair(d_layout=layout)):
        report = lab.run(case.patched(*SLUGS, prefill=False))
        assert report.outcome == "identical", (case.name, report)
