"""kvcached's contiguous layout: rows of all layers, between two of them and to any other cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.patches import SLUGS

from .case import Case, EngineSpec, Family, Report, Sabotage
from .host import Lab
from .releases import moves_full_blocks_only
from .test_like_pairs import tokens_to_move
from .test_patches import pairs_halves

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: kvcached's tensors have as many blocks as its virtual memory, whatever was planned.
_ROWS = EngineSpec(
    layout="NHD", planned_blocks=24, tensor_blocks=40, layers=3, allocation="contiguous"
)
_PLAIN = EngineSpec(layout="NHD", planned_blocks=32, layers=3)
_PROMPT_TOKENS = 107


def _run(lab: Lab, prefill: EngineSpec, decode: EngineSpec, **how: object) -> Report:
    return lab.run(_case(prefill, decode), **how)  # type: ignore[arg-type]


def _case(prefill: EngineSpec, decode: EngineSpec, prompt_tokens: int = _PROMPT_TOKENS) -> Case:
    return Case("rows", prefill, decode, prompt_tokens=prompt_tokens)


def _on(spec: EngineSpec) -> EngineSpec:
    return replace(spec, patched=True, patches=SLUGS)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["flash", "flashinfer", "mla"])
def test_two_pools_move_a_block_of_all_layers_as_one_descriptor(
    lab: Lab, family: Family, layout: str
) -> None:
    spec = _on(replace(_ROWS, family=family, layout="NHD" if family == "mla" else layout))
    case = _case(spec, replace(spec, tensor_blocks=52))

    report = lab.run(case)

    assert report.outcome == "identical", report
    moved = tokens_to_move(case, lab.release)
    assert report.moved_tokens == moved
    assert report.descriptors == -(-moved // spec.block_tokens)
    assert report.registrations == 1


@pytest.mark.parametrize("sabotage", ["shift_block", "skip_layer", "flip_byte"])
def test_a_spoilt_pool_is_noticed(lab: Lab, sabotage: Sabotage) -> None:
    report = _run(lab, _on(_ROWS), _on(_ROWS), sabotage=sabotage)

    assert report.outcome == "corrupt", report
    assert report.wrong_elements > 0


def test_a_prefix_hit_and_several_requests(lab: Lab) -> None:
    case = Case("hit", _on(_ROWS), _on(_ROWS), 100, prefix_hit_tokens=32, n_requests=3)

    report = lab.run(case)

    assert report.outcome == "identical", report
    assert report.moved_tokens == tokens_to_move(case, lab.release)


@pytest.mark.parametrize("family", ["flash", "flashinfer", "mla"])
def test_rows_on_d_alone_read_a_stock_plain_p(lab: Lab, family: Family) -> None:
    rows, plain = replace(_ROWS, family=family), replace(_PLAIN, family=family)

    report = _run(lab, plain, _on(rows))

    assert report.outcome == "identical", report
    assert report.registrations <= 2  # the staging pool, where the parts differ inside
    assert _run(lab, plain, _on(rows), sabotage="shift_block").outcome == "corrupt"


@pytest.mark.parametrize("family", ["flash", "flashinfer", "mla"])
def test_rows_on_p_are_read_by_a_plain_d_with_kvpatch(lab: Lab, family: Family) -> None:
    rows, plain = replace(_ROWS, family=family), replace(_PLAIN, family=family)

    report = _run(lab, _on(rows), _on(plain))

    assert report.outcome == "identical", report
    assert _run(lab, _on(rows), _on(plain), sabotage="skip_layer").outcome == "corrupt"


@pytest.mark.parametrize("family", ["flash", "flashinfer", "mla"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_stock_d_refuses_rows(lab: Lab, family: Family, layout: str, layers: int) -> None:
    """A single layer's row may be that layer's block, which any release reads rightly."""
    rows, plain = (
        replace(spec, family=family, layout=layout, layers=layers) for spec in (_ROWS, _PLAIN)
    )

    report = _run(lab, _on(rows), plain)

    # On releases <= 0.21 an engine ends over a handshake that failed.
    allowed = ("refused", "failed") if layers > 1 else ("refused", "failed", "identical")
    assert report.outcome in allowed, report


@pytest.mark.parametrize(("p", "d"), [(16, 64), (64, 16), (32, 48)])
def test_rows_of_unlike_blocks_and_layouts(lab: Lab, p: int, d: int) -> None:
    prefill = _on(replace(_ROWS, block_tokens=p, layout="HND"))
    decode = _on(replace(_ROWS, block_tokens=d))

    report = lab.run(_case(prefill, decode, 150))

    assert report.outcome == "identical", report
    if moves_full_blocks_only(lab.release) and not report.moved_tokens:
        return  # 0.10.0 had nothing to send
    assert lab.run(_case(prefill, decode, 150), sabotage="shift_block").outcome == "corrupt"


@pytest.mark.parametrize("rows_on", ["prefill", "decode"])
def test_rows_and_a_plain_cache_of_unlike_blocks(lab: Lab, rows_on: str) -> None:
    rows, plain = _on(replace(_ROWS, block_tokens=32)), replace(_PLAIN, block_tokens=64)
    pair = (rows, _on(plain)) if rows_on == "prefill" else (plain, rows)

    report = lab.run(_case(*pair, 150))

    assert report.outcome == "identical", report


@pytest.mark.parametrize("rows_on", ["prefill", "decode"])
def test_rows_and_split_halves(lab: Lab, rows_on: str) -> None:
    rows, halves = _on(_ROWS), _on(replace(_ROWS, allocation="split_half"))
    pair = (rows, halves) if rows_on == "prefill" else (halves, rows)

    report = _run(lab, *pair)

    # From 0.26 on halves, twice as many regions as a peer states, are refused.
    can_pair = rows_on == "prefill" or pairs_halves(lab.release)
    assert report.outcome == ("identical" if can_pair else "refused"), report
    if can_pair:
        assert _run(lab, *pair, sabotage="skip_layer").outcome == "corrupt"


@pytest.mark.parametrize("rows_on", ["both", "prefill", "decode"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_rows_of_unlike_ranks(lab: Lab, p_tp: int, d_tp: int, rows_on: str) -> None:
    prefill, decode = (
        _on(replace(_ROWS if rows_on in ("both", side) else _PLAIN, tp_size=tp))
        for side, tp in (("prefill", p_tp), ("decode", d_tp))
    )

    report = _run(lab, prefill, decode)

    assert report.outcome in ("identical", "refused"), report


def test_without_the_patch_rows_are_refused_or_wrong(lab: Lab) -> None:
    """What it is for; with kvpatch on and a reader missing it is refused, never wrong."""
    stock = _run(lab, _ROWS, _ROWS)
    others = tuple(slug for slug in SLUGS if slug != "unlike_engines")

    alone = _run(
        lab,
        replace(_ROWS, patched=True, patches=others),
        replace(_ROWS, patched=True, patches=others),
    )

    assert stock.outcome != "identical", stock
    assert alone.outcome == "refused", alone
    assert "KVCACHED_CONTIGUOUS_LAYOUT=false" in alone.detail
