"""kvcached's pools under several attention groups: full attention beside sliding windows.

The i-th layers of all groups have one place in a pool, as kvcached hands it out; a block is
one group's. P and D run the release's own scheduler and allocator.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec, Report
from .host import Lab
from .kvcached_cells import LAYOUTS
from .releases import has_named_layouts
from .test_cache_groups import MODELS, WINDOW, engine_of

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.18")]

_PROMPT_TOKENS = 300


def _spec(model: str, block_tokens: int, layout: str = "contiguous") -> EngineSpec:
    found = replace(engine_of(model, block_tokens), layout="NHD", patched=True)
    if not layout:
        return found
    return replace(found, allocation=LAYOUTS[layout], tensor_blocks=2 * found.planned_blocks)


def _run(lab: Lab, prefill: EngineSpec, decode: EngineSpec, hit_blocks: int = 0) -> Report:
    hit = hit_blocks * decode.block_tokens
    return lab.run(Case("groups", prefill, decode, _PROMPT_TOKENS, hit))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hit_blocks", [0, 2])
def test_two_pools_move_a_block_of_a_groups_layers_as_one_descriptor(
    lab: Lab, model: str, hit_blocks: int
) -> None:
    spec = _spec(model, 32)

    report = _run(lab, spec, spec, hit_blocks).must_be("identical")
    assert report.registrations == 1
    whole = -(-_PROMPT_TOKENS // 32)
    of_window = whole - (_PROMPT_TOKENS - WINDOW + 1) // 32
    groups = len(MODELS[model][0])
    # A window's block that a prefix hit has left in place is D's already.
    assert report.descriptors == whole - hit_blocks + (groups - 1) * of_window


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("p", "p_tokens", "d", "d_tokens"),
    [
        ("split-half", 32, "split-half", 32),
        ("split-half", 64, "split-half", 32),
        ("contiguous", 32, "contiguous", 64),
        ("contiguous", 64, "contiguous", 32),
        # Beside a plain cache.
        ("contiguous", 32, "", 32),
        ("contiguous", 64, "", 32),
        ("", 32, "contiguous", 32),
        ("", 64, "contiguous", 32),
    ],
)
def test_other_pools(lab: Lab, model: str, p: str, p_tokens: int, d: str, d_tokens: int) -> None:
    prefill, decode = _spec(model, p_tokens, p), _spec(model, d_tokens, d)

    _run(lab, prefill, decode, hit_blocks=1).must_be("identical")


def test_other_layers_side_by_side_are_refused(lab: Lab) -> None:
    """P has layers 0, 1 and 2 in one place, and D 0 and 1."""
    three = _spec("three groups", 32)
    two = replace(three, window_tokens=MODELS["two groups"][0])

    _run(lab, three, two).must_be(
        "refused",
        "its attention groups have other layers side by side than ours",
        "KVCACHED_CONTIGUOUS_LAYOUT=false on P",
    )


# --- groups of unlike shapes (Gemma), which kvcached views over blocks of one size ---

#: (heads, channels) with full attention, and of windows; vLLM plans blocks of more tokens
#: for what is smaller.
SHAPES = {
    "more channels in windows": ((2, 16), (1, 32)),
    "windows of 64 tokens": ((2, 16), (1, 16)),
    "full attention of 64 tokens": ((1, 16), (2, 16)),
}


#: In these the smaller blocks have more tokens, where pages are unified.
_UNIFIED = ("windows of 64 tokens", "full attention of 64 tokens")


def _packs(lab: Lab, layout: str) -> bool:
    """From 0.29 on a contiguous pool has blocks of one number of tokens, each group's packed."""
    return has_named_layouts(lab.release) and layout == "contiguous"


def _unlike(lab: Lab, shape: str, block_tokens: int, layout: str) -> EngineSpec:
    """An engine with kvpatch; a stock one with vLLM's own pool where that has a name of vLLM's."""
    (heads, channels), of_windows = SHAPES[shape]
    is_kvcacheds = layout in LAYOUTS
    found = _spec("three groups", block_tokens, layout if is_kvcacheds else "")
    blocks = 2 * found.planned_blocks
    found = replace(
        found,
        kv_heads=heads,
        head_dim=channels,
        window_shape=of_windows,
        packs_pages=layout.startswith("B") or _packs(lab, layout),
        planned_blocks=blocks,
        tensor_blocks=2 * blocks if is_kvcacheds else None,
    )
    return found if is_kvcacheds or not layout else replace(found, layout=layout, patched=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("p", "d", "p_tokens"),
    [
        ("contiguous", "contiguous", 32),
        ("contiguous", "contiguous", 64),
        ("contiguous", "", 32),
        ("", "contiguous", 64),
        ("split-half", "split-half", 32),
        ("split-half", "split-half", 64),
    ],
)
def test_groups_of_unlike_shapes(lab: Lab, shape: str, p: str, d: str, p_tokens: int) -> None:
    report = _run(lab, _unlike(lab, shape, p_tokens, p), _unlike(lab, shape, 32, d), hit_blocks=2)

    if _packs(lab, p) != _packs(lab, d) and shape in _UNIFIED:
        # The plain cache's pages are unified, which makes other groups of the layers.
        report.must_be("refused")
        return
    report.must_be("identical", moved=_PROMPT_TOKENS - 64)
    if p == d == "contiguous" and p_tokens == 32:
        assert report.registrations == 1
        if _packs(lab, p) and shape in _UNIFIED:
            # 0.30 splits what would make a block wider than full attention needs.
            splits = shape.startswith("full") and Version(lab.release) >= Version("0.30")
            assert report.descriptors == 8 + 3 * (4 if splits else 1)
            return
        whole = 4 if shape.startswith("full") else 8
        windows = 2 * (2 if shape.startswith("windows") else 3)
        assert report.descriptors == whole + windows


def test_unlike_shapes_in_items_of_another_size_are_refused(lab: Lab) -> None:
    """Bytes would tell half the tokens, which is not what P states."""
    d = _unlike(lab, "windows of 64 tokens", 32, "contiguous")

    _run(lab, replace(d, dtype="fp8"), d).must_be("refused")


# --- groups of unlike shapes whose pages lie packed in rows of blocks (0.29 on) ------------
#
# vLLM's own pools in BLHNC and BLNHC, and kvcached's contiguous one, which is laid out the same:
# where blocks are outermost the release plans blocks of one number of tokens, and every group
# divides a row in its own way. Where layers are, it gives smaller ones blocks of more tokens, in
# other groups.


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize("shape", _UNIFIED)
@pytest.mark.parametrize(
    ("p", "p_tokens", "d"),
    [
        ("BLHNC", 32, "BLHNC"),
        ("BLNHC", 32, "BLNHC"),
        ("BLNHC", 64, "BLHNC"),
        ("BLHNC", 32, "contiguous"),
        ("BLNHC", 64, "contiguous"),
        ("contiguous", 32, "BLNHC"),
        ("contiguous", 64, "BLHNC"),
    ],
)
def test_packed_pages_are_read(lab: Lab, shape: str, p: str, p_tokens: int, d: str) -> None:
    prefill, decode = _unlike(lab, shape, p_tokens, p), _unlike(lab, shape, 32, d)

    report = _run(lab, prefill, replace(decode, patched=True), hit_blocks=2)
    report.must_be("identical", moved=_PROMPT_TOKENS - 64)


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_stock_leaves_the_ends_of_pages_out(lab: Lab, layout: str) -> None:
    """From 0.30 on, where a smaller page begins in the same place."""
    spec = _unlike(lab, "full attention of 64 tokens", 32, layout)

    report = _run(lab, spec, spec, hit_blocks=2)

    is_wrong = Version(lab.release) >= Version("0.30")
    report.must_be("corrupt" if is_wrong else "identical")
    assert bool(report.wrong_elements) is is_wrong


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize(("p", "d"), [("LBHNC", "contiguous"), ("contiguous", "LBHNC")])
def test_pages_of_one_size_are_in_other_groups(lab: Lab, p: str, d: str) -> None:
    prefill, decode = (
        replace(_unlike(lab, "windows of 64 tokens", 32, layout), patched=True) for layout in (p, d)
    )

    _run(lab, prefill, decode, hit_blocks=2).must_be(
        "refused", "groups", "KVCACHED_CONTIGUOUS_LAYOUT=false"
    )
