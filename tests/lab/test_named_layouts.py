"""vLLM's six named layouts (0.29 on), read in any combination with kvpatch on D alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from .case import Case, EngineSpec, Report, Sabotage
from .host import Lab
from .release import HYBRID_MODEL_TOKENS

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(names_layouts=True)]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PAIRS = list(itertools.product(LAYOUTS, repeat=2))


def _case(
    p_layout: str,
    d_layout: str,
    p_tokens: int = 32,
    d_tokens: int = 64,
    hit: int = 0,
    **common: object,
) -> Case:
    # Three layers and four heads: neither a square nor a power of the other.
    spec = EngineSpec(planned_blocks=16, layers=3, dtype="bfloat16")
    spec = replace(spec, **common)  # type: ignore[arg-type]
    prefill = replace(spec, layout=p_layout, block_tokens=p_tokens)
    decode = replace(spec, layout=d_layout, block_tokens=d_tokens)
    name = f"P {p_layout} {p_tokens}, D {d_layout} {d_tokens}"
    return Case(name, prefill, decode, prompt_tokens=150, prefix_hit_tokens=hit)


def _run(lab: Lab, case: Case, **settings: Sabotage) -> Report:
    return lab.on_d(case, **settings)


@pytest.mark.parametrize(("p_layout", "d_layout"), PAIRS)
def test_any_layout_is_read_into_any(lab: Lab, p_layout: str, d_layout: str) -> None:
    _run(lab, _case(p_layout, d_layout)).must_be("identical", moved=150)


@pytest.mark.parametrize(
    ("p_layout", "p_tokens", "d_layout", "d_tokens"),
    [
        ("LHBNC", 32, "BLNHC", 32),
        ("BHLNC", 32, "LBNHC", 32),
        ("BLNHC", 96, "BHLNC", 64),
        ("LHBNC", 96, "LHBNC", 64),
        ("BHLNC", 16, "LHBNC", 128),
        ("BLNHC", 128, "BLHNC", 16),
    ],
)
def test_other_block_sizes_and_a_prefix_hit(
    lab: Lab, p_layout: str, p_tokens: int, d_layout: str, d_tokens: int
) -> None:
    _run(lab, _case(p_layout, d_layout, p_tokens, d_tokens, hit=d_tokens)).must_be(
        "identical", moved=150 - d_tokens
    )


@pytest.mark.parametrize(
    ("p_layout", "p_tp", "d_layout", "d_tp", "d_tokens"),
    [
        ("BHLNC", 1, "LBHNC", 2, 64),
        ("BHLNC", 1, "BHLNC", 2, 32),
        ("LHBNC", 1, "BLNHC", 2, 64),
        ("BLNHC", 2, "LHBNC", 1, 64),
        ("LHBNC", 2, "LHBNC", 1, 32),
    ],
)
def test_unlike_ranks(
    lab: Lab, p_layout: str, p_tp: int, d_layout: str, d_tp: int, d_tokens: int
) -> None:
    case = _case(p_layout, d_layout, 32, d_tokens)
    prefill = replace(case.prefill, tp_size=p_tp)
    _run(lab, replace(case, prefill=prefill, decode=replace(case.decode, tp_size=d_tp))).must_be(
        "identical"
    )


def test_one_head_a_rank(lab: Lab) -> None:
    """A single head's page is in one piece in every layout; 0.29 does not notice it."""
    for p_layout, d_layout in (("BHLNC", "LHBNC"), ("LHBNC", "BLNHC"), ("BLNHC", "BHLNC")):
        report = _run(lab, _case(p_layout, d_layout, kv_heads=1))
        assert report.outcome == "identical", (p_layout, d_layout, report)


@pytest.mark.parametrize(
    ("p_layout", "d_layout"),
    [("BHLNC", "LBHNC"), ("LBHNC", "BHLNC"), ("BLNHC", "BLHNC"), ("LHBNC", "BLNHC")],
)
def test_latents(lab: Lab, p_layout: str, d_layout: str) -> None:
    _run(lab, _case(p_layout, d_layout, family="mla", head_dim=64)).must_be("identical")


def test_layers_beyond_ten(lab: Lab) -> None:
    """Sorted as names, the eleventh layer would come before the third."""
    for p_layout, d_layout in (("BHLNC", "LHBNC"), ("LHBNC", "BLNHC")):
        report = _run(lab, _case(p_layout, d_layout, layers=12))
        assert report.outcome == "identical", (p_layout, d_layout, report)


@pytest.mark.parametrize("sabotage", ["shift_block", "skip_layer", "flip_byte"])
def test_a_spoilt_cache_is_noticed(lab: Lab, sabotage: Sabotage) -> None:
    _run(lab, _case("LHBNC", "BLHNC"), sabotage=sabotage).must_be("corrupt")


def _groups(layout: str, tokens: int) -> EngineSpec:
    blocks = 3 * (HYBRID_MODEL_TOKENS // tokens + 2)
    return EngineSpec(
        layout=layout, block_tokens=tokens, planned_blocks=blocks, layers=4, window_tokens=(0, 64)
    )


@pytest.mark.parametrize(
    ("p_layout", "d_layout"),
    [("LHBNC", "LBHNC"), ("LBHNC", "LHBNC"), ("LBHNC", "BHLNC"), ("BLHNC", "BLNHC")],
)
def test_several_cache_groups(lab: Lab, p_layout: str, d_layout: str) -> None:
    _run(lab, Case("groups", _groups(p_layout, 32), _groups(d_layout, 64), 300)).must_be(
        "identical"
    )


@pytest.mark.parametrize("p_layout", ["BLNHC", "BHLNC"])
def test_rows_of_several_cache_groups(lab: Lab, p_layout: str) -> None:
    """Every group's layers follow one another from a row's beginning, as the plan has them."""
    case = Case("groups", _groups(p_layout, 32), _groups("LBHNC", 64), 300)

    _run(lab, case).must_be("identical")
    assert _run(lab, case, sabotage="skip_layer").outcome == "corrupt"


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize(
    ("p_layout", "d_layout"),
    [("LHBNC", "BLNHC"), ("BHLNC", "LHBNC"), ("BLNHC", "BHLNC"), ("BHLNC", "LBNHC")],
)
def test_either_way_of_reading(lab: Lab, p_layout: str, d_layout: str, way: str) -> None:
    case = _case(p_layout, d_layout, 96, 64)
    decode = replace(case.decode, settings=(("KVPATCH_TRANSFER", way),))
    _run(lab, replace(case, decode=decode)).must_be("identical")
