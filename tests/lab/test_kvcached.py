"""kvcached's own view code, over memory of which only the pages in use are there.

Its own NIXL patch (its real code) beside kvpatch, and input that contradicts itself: each is
refused, with what was found, what was expected and what to set.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.patches import SLUGS
from kvpatch.peer.block_shapes import PAGE_BYTES

from .caches import ODD_LAYER, UNMAPPED
from .case import PEER_BLOCK_SIZE, Case, EngineSpec, Family, Report
from .child import KVCACHEDS_OWN
from .host import Lab
from .kvcached_cells import LAYOUTS, case, cells, spec
from .releases import has_named_layouts, moves_full_blocks_only, states_layout
from .test_like_pairs import tokens_to_move
from .test_patches import pairs_halves

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: Tensors that are laid out as kvcached's, of all whose blocks there is memory.
_ROWS = EngineSpec(
    layout="NHD", planned_blocks=24, tensor_blocks=40, layers=3, allocation="contiguous"
)
_HALVES = replace(_ROWS, allocation="split_half")


@pytest.mark.parametrize(("family", "layout", "side"), list(cells()))
def test_kvcacheds_layouts(lab: Lab, family: Family, layout: str, side: str) -> None:
    """A read or a write outside the pages in use would end the process that does it."""
    report = lab.run(case(family, layout, side, by_kvpatch=True)).must_be("identical")
    if layout == "contiguous" and side == "both":
        assert report.descriptors == -(-report.moved_tokens // 16)
        assert report.registrations == 1


def test_a_prefix_hit_and_several_requests(lab: Lab) -> None:
    rows = spec("flash", LAYOUTS["contiguous"]).on()
    wanted = Case("hit", rows, replace(rows, tensor_blocks=52), 100, 32, n_requests=3)

    lab.run(wanted).must_be("identical", moved=tokens_to_move(wanted, lab.release))


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
        )
        for engine, tokens in zip((beside.prefill, beside.decode), sizes, strict=True)
    )

    lab.run(Case("beside", p, d, prompt_tokens=300)).must_be("identical")


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

    lab.run(full).must_be("refused", "or it has kvcached")
    lab.run(odd).must_be("identical")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("p", "d"), [(16, 64), (64, 16)])
def test_heads_first_and_unlike_blocks(lab: Lab, p: int, d: int, layout: str) -> None:
    """Packed tensors alone can be HND; <= 0.25 kvcached's are NHD, whatever is asked."""
    rows = replace(spec("flash", LAYOUTS[layout]), patched=True)
    prefill = replace(rows, layout="HND", block_tokens=p)
    decode = replace(rows, layout="NHD", block_tokens=d)

    report = lab.run(Case("unlike", prefill, decode, prompt_tokens=150))

    if moves_full_blocks_only(lab.release) and not report.moved_tokens:
        assert report.outcome != "corrupt", report  # 0.10.0 had nothing to send
        return
    # Rows name their layout on 0.10.0 too; split halves there have D's, as the lab says.
    report.must_be("identical")


# --- rows of all layers --------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    ("family", "layout"), [("flash", "HND"), ("flashinfer", "NHD"), ("mla", "NHD")]
)
def test_a_stock_d_refuses_rows(lab: Lab, family: Family, layout: str, layers: int) -> None:
    """A single layer's row may be that layer's block, which any release reads rightly."""
    found = case(family, "contiguous", "P", by_kvpatch=True)
    p, d = (replace(one, layers=layers, layout=layout) for one in (found.prefill, found.decode))

    report = lab.run(Case("rows", p, replace(d, patched=False), prompt_tokens=107))

    # On releases <= 0.21 an engine ends over a handshake that failed.
    allowed = ("refused", "failed") if layers > 1 else ("refused", "failed", "identical")
    assert report.outcome in allowed, report


@pytest.mark.parametrize("rows_on", ["P", "D"])
def test_rows_and_split_halves(lab: Lab, rows_on: str) -> None:
    """Tensors that are laid out as kvcached's: its own are no halves from 0.29 on."""
    rows, halves = _ROWS.on(), _HALVES.on()
    wanted = Case("both", *((rows, halves) if rows_on == "P" else (halves, rows)), 107)

    report = lab.run(wanted)

    # From 0.26 on halves, twice as many regions as a peer states, are refused.
    can_pair = rows_on == "P" or pairs_halves(lab.release)
    report.must_be("identical" if can_pair else "refused")


@pytest.mark.parametrize("side", ["both", "P", "D"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
def test_rows_of_unlike_ranks(lab: Lab, ranks: tuple[int, int], side: str) -> None:
    found = case("flash", "contiguous", side, by_kvpatch=True)
    p, d = (
        replace(e, tp_size=n) for e, n in zip((found.prefill, found.decode), ranks, strict=True)
    )

    report = lab.run(Case("ranks", p, d, prompt_tokens=107))

    assert report.outcome in ("identical", "refused"), report


def test_without_the_patch_rows_are_refused_or_wrong(lab: Lab) -> None:
    """What it is for; with kvpatch on and a reader missing it is refused, never wrong."""
    rows = spec("flash", LAYOUTS["contiguous"])
    others = tuple(slug for slug in SLUGS if slug != "unlike_engines")
    without = replace(rows, patched=True, patches=others)

    stock, alone = (lab.run(Case("rows", one, one, 107)) for one in (rows, without))

    assert stock.outcome != "identical", stock
    alone.must_be("refused", "KVCACHED_CONTIGUOUS_LAYOUT=false")


# --- kvcached's own NIXL patch, in either order ------------------------------------------


def _beside_own(engine: EngineSpec, order: str, *, patched: bool = True) -> Case:
    """Alone it refuses its default layout; with kvpatch in the process kvpatch takes its place."""
    layout = "true" if engine.allocation == "contiguous" else "false"
    settings = ((KVCACHEDS_OWN, order), ("KVCACHED_CONTIGUOUS_LAYOUT", layout))
    one = replace(engine, settings=settings, patched=patched)
    return Case("kvcached's own", one, one, prompt_tokens=107)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("engine", [_ROWS, _HALVES], ids=["rows", "halves"])
def test_kvpatch_takes_its_place(lab: Lab, engine: EngineSpec, order: str) -> None:
    wanted = _beside_own(engine, order)

    report = lab.run(wanted).must_be("identical")
    if engine is _ROWS:
        assert report.descriptors == -(-report.moved_tokens // engine.block_tokens)
        assert report.registrations == 1


def test_alone_it_refuses_its_own_default_layout(lab: Lab) -> None:
    lab.run(_beside_own(_ROWS, "before", patched=False)).must_be(
        "refused", "requires KVCACHED_CONTIGUOUS_LAYOUT=false"
    )


def test_without_a_patch_that_does_its_part_it_stays_and_kvpatch_refuses(lab: Lab) -> None:
    others = tuple(slug for slug in SLUGS if slug != "block_count")
    one = replace(_beside_own(_HALVES, "before").prefill, patches=others)

    lab.run(Case("kvcached's own", one, one)).must_be("refused", "kvpatch cannot patch")


# --- tensors, variables and pages that contradict one another ------------------------------


def _with(layout: str, *settings: tuple[str, str]) -> EngineSpec:
    return replace(spec("flash", LAYOUTS[layout]).on(), settings=settings)


def _run(lab: Lab, prefill: EngineSpec, decode: EngineSpec) -> Report:
    return lab.run(Case("bad input", prefill, decode, prompt_tokens=107))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_the_variable_denies(lab: Lab, layout: str) -> None:
    said, other = ("false", "true") if layout == "contiguous" else ("true", "false")
    contrary, right = (
        _with(layout, ("KVCACHED_CONTIGUOUS_LAYOUT", value)) for value in (said, other)
    )

    _run(lab, contrary, contrary).must_be(
        "refused",
        f"KVCACHED_CONTIGUOUS_LAYOUT={said} and ",
        "allocation",
        "set KVCACHED_CONTIGUOUS_LAYOUT",
    )
    _run(lab, right, right).must_be("identical")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("odd", "said"), [("other", "lie in none of its pools"), ("claims", "says that it lies in")]
)
def test_a_tensor_outside_the_pool(lab: Lab, layout: str, odd: str, said: str) -> None:
    strange = _with(layout, (ODD_LAYER, odd))
    if has_named_layouts(lab.release):
        said = "unlike sizes"  # the release makes the views, and kvcached marks none

    _run(lab, strange, strange).must_be(
        "refused", "layers.2.", said, "xpected", "ENABLE_KVCACHED=false"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_page_that_is_not_mapped_under_a_descriptor(
    lab: Lab, layout: str, block_tokens: int
) -> None:
    """Between like engines the release reads split halves itself, and is stopped as well."""
    if block_tokens != 16 and layout == "split-half" and not states_layout(lab.release):
        pytest.skip("0.10.0 states no layout: unlike halves are refused at the handshake")
    prefill = _with(layout)
    told = (PEER_BLOCK_SIZE, str(prefill.block_tokens))  # so that it loads the first prompt
    decode = replace(_with(layout, (UNMAPPED, "1"), told), block_tokens=block_tokens)

    _run(lab, prefill, decode).must_be(
        "refused", "is not mapped: found the page of zeros", "one of its own for every block"
    )
