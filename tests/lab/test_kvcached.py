"""kvcached's own view code, over memory of which only the pages in use are there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch._versions import generation_of
from kvpatch.patches import SLUGS
from tests.releases import kvcached

from .case import Case, Family, Sabotage
from .host import Lab
from .kvcached_cells import LAYOUTS, case, cells, spec
from .releases import moves_full_blocks_only, states_layout

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_CELLS = tuple(cells())
_PACKED = ("g0260", "g0290", "g0300")


@pytest.fixture(scope="module", autouse=True)
def _source() -> None:
    kvcached.fetch(kvcached.NEWEST)


def _keys_first(lab: Lab, family: Family) -> bool:
    return family == "flash" and generation_of(lab.release).slug in (
        *("g0100", "g0101", "g0102", "g0110", "g0111", "g0130", "g0140", "g0160"),
        *("g0180", "g0200"),
    )


@pytest.mark.parametrize(("family", "layout", "side"), _CELLS)
def test_kvcacheds_layouts(lab: Lab, family: Family, layout: str, side: str) -> None:
    """A read or a write outside the pages in use would end the process that does it."""
    report = lab.run(case(family, layout, side, by_kvpatch=True))

    # A split-half layer is two regions, a plain one of blocks [K/V] is one.
    alike = family == "mla" or _keys_first(lab, family)
    packed = generation_of(lab.release).slug in _PACKED
    expected = ("identical",)
    if layout == "split-half" and side != "both" and not alike and not packed:
        expected = ("refused",)
    assert report.outcome in expected, report
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("p", "d"), [(16, 64), (64, 16)])
def test_heads_first_and_unlike_blocks(lab: Lab, p: int, d: int, layout: str) -> None:
    """Packed tensors alone can be HND; to 0.25 kvcached's are NHD, whatever is asked."""
    rows = replace(spec("flash", LAYOUTS[layout]), patched=True, patches=SLUGS)
    prefill = replace(rows, layout="HND", block_tokens=p)
    decode = replace(rows, layout="NHD", block_tokens=d)

    report = lab.run(Case("unlike", prefill, decode, prompt_tokens=150))

    if moves_full_blocks_only(lab.release) and not report.moved_tokens:
        assert report.outcome != "corrupt", report  # 0.10.0 had nothing to send
        return
    # Rows name their tokens and layout on 0.10.0 too.
    can_tell = layout == "contiguous" or states_layout(lab.release)
    expected = "identical" if can_tell else "refused"
    assert report.outcome == expected, report
