"""kvcached's own view code, over memory of which only the pages in use are there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.patches import SLUGS
from kvpatch.peer.split_kv import PAGE_BYTES

from .case import Case, Family, Sabotage
from .host import Lab
from .kvcached_cells import LAYOUTS, case, cells, spec
from .releases import moves_full_blocks_only, states_layout

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_CELLS = tuple(cells())


@pytest.mark.parametrize(("family", "layout", "side"), _CELLS)
def test_kvcacheds_layouts(lab: Lab, family: Family, layout: str, side: str) -> None:
    """A read or a write outside the pages in use would end the process that does it."""
    report = lab.run(case(family, layout, side, by_kvpatch=True))

    assert report.outcome == "identical", report
    if layout == "contiguous" and side == "both":
        assert report.descriptors == -(-report.moved_tokens // 16)
        assert report.registrations == 1


@pytest.mark.parametrize("sabotage", ["skip_layer", "flip_byte"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["flash", "mla"])
def test_a_spoilt_cache_is_noticed(
    lab: Lab, family: Family, layout: str, sabotage: Sabotage
) -> None:
    report = lab.run(case(family, layout, "both", by_kvpatch=True), sabotage=sabotage)

    assert report.outcome == "corrupt", report
    assert report.wrong_elements > 0


@pytest.mark.parametrize("sabotage", ["skip_layer", "flip_byte"])
@pytest.mark.parametrize("side", ["P", "D"])
def test_a_spoilt_cache_beside_a_plain_one_is_noticed(
    lab: Lab, side: str, sabotage: Sabotage
) -> None:
    beside = case("flashinfer", "split-half", side, by_kvpatch=True)
    if side == "D" and not states_layout(lab.release):
        pytest.skip("this pair is refused")

    report = lab.run(beside, sabotage=sabotage)

    assert report.outcome == "corrupt", report
    assert report.wrong_elements > 0


@pytest.mark.on(states_layout=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_beside_a_plain_cache_of_other_blocks(
    lab: Lab, layout: str, side: str, sizes: tuple[int, int]
) -> None:
    """The plain one is HND, as vLLM's connector asks for; the other NHD, as kvcached's are."""
    beside = case("flashinfer", layout, side, by_kvpatch=True)
    p, d = (
        replace(
            engine,
            block_tokens=tokens,
            layout="NHD" if engine.is_kvcacheds else "HND",
            patched=engine is beside.decode or engine.is_kvcacheds,
            patches=SLUGS if engine is beside.decode or engine.is_kvcacheds else (),
        )
        for engine, tokens in zip((beside.prefill, beside.decode), sizes, strict=True)
    )

    report = lab.run(Case("beside", p, d, prompt_tokens=300))

    assert report.outcome == "identical", report


def test_a_plain_p_that_may_be_kvcacheds_is_refused_by_halves(lab: Lab) -> None:
    """Its keys and values, if they were apart, would fill 2 MiB of kvcached's pages each."""
    if not states_layout(lab.release) or FACTS[lab.release].cache_shape == "packed":
        pytest.skip("this release states no layout, or packs keys and values")
    beside = case("flashinfer", "split-half", "D", by_kvpatch=True)
    block_bytes = 16 * beside.prefill.kv_heads * beside.prefill.head_dim * 2
    full, odd = (
        replace(beside, prefill=replace(beside.prefill, planned_blocks=blocks))
        for blocks in (PAGE_BYTES // block_bytes, PAGE_BYTES // block_bytes + 1)
    )

    report = lab.run(full)

    assert report.outcome == "refused", report
    assert "or it has kvcached" in report.detail
    assert lab.run(odd).outcome == "identical"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("p", "d"), [(16, 64), (64, 16)])
def test_heads_first_and_unlike_blocks(lab: Lab, p: int, d: int, layout: str) -> None:
    """Packed tensors alone can be HND; <= 0.25 kvcached's are NHD, whatever is asked."""
    rows = replace(spec("flash", LAYOUTS[layout]), patched=True, patches=SLUGS)
    prefill = replace(rows, layout="HND", block_tokens=p)
    decode = replace(rows, layout="NHD", block_tokens=d)

    report = lab.run(Case("unlike", prefill, decode, prompt_tokens=150))

    if moves_full_blocks_only(lab.release) and not report.moved_tokens:
        assert report.outcome != "corrupt", report  # 0.10.0 had nothing to send
        return
    # Rows name their layout on 0.10.0 too; split halves there have D's, as the lab says.
    assert report.outcome == "identical", report
