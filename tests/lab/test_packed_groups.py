"""Groups of unlike shapes whose pages lie packed in rows of blocks (0.29 on, BLHNC and BLNHC).

vLLM's own pools, and kvcached's contiguous one, which is laid out the same: where blocks are
outermost the release plans blocks of one number of tokens, and every group divides a row in
its own way. Where layers are, it gives smaller ones blocks of more tokens, in other groups.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec, Report, Sabotage
from .host import Lab
from .test_cache_groups import engine_of
from .test_kvcached_groups import SHAPES

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(names_layouts=True)]

_UNLIKE = ("windows of 64 tokens", "full attention of 64 tokens")


def _spec(shape: str, layout: str, block_tokens: int = 32) -> EngineSpec:
    """vLLM's own pool in a named layout; kvcached's where that is called "contiguous"."""
    (heads, channels), of_windows = SHAPES[shape]
    found = engine_of("three groups", block_tokens)
    blocks = 2 * found.planned_blocks
    found = replace(
        found,
        layout=layout,
        kv_heads=heads,
        head_dim=channels,
        window_shape=of_windows,
        planned_blocks=blocks,
        packs_pages=not layout.startswith("L"),
    )
    if layout != "contiguous":
        return found
    pool = replace(found, layout="NHD", allocation="kvcached_rows", tensor_blocks=2 * blocks)
    return _on(pool)


def _on(spec: EngineSpec) -> EngineSpec:
    return replace(spec, patched=True)


def _run(lab: Lab, p: EngineSpec, d: EngineSpec, sabotage: Sabotage | None = None) -> Report:
    return lab.run(Case("packed", p, d, 300, 64), sabotage=sabotage)


@pytest.mark.parametrize("shape", _UNLIKE)
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
    prefill, decode = _spec(shape, p, p_tokens), _on(_spec(shape, d))

    _run(lab, prefill, decode).must_be("identical", moved=300 - 64)


@pytest.mark.parametrize("sabotage", ["skip_layer", "flip_byte"])
def test_a_spoilt_cache_is_noticed(lab: Lab, sabotage: Sabotage) -> None:
    spec = _spec("full attention of 64 tokens", "BLNHC")

    _run(lab, spec, _on(spec), sabotage).must_be("corrupt")


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_stock_leaves_the_ends_of_pages_out(lab: Lab, layout: str) -> None:
    """From 0.30 on, where a smaller page begins in the same place."""
    spec = _spec("full attention of 64 tokens", layout)

    report = _run(lab, spec, spec)

    is_wrong = Version(lab.release) >= Version("0.30")
    assert report.outcome == ("corrupt" if is_wrong else "identical"), report
    assert bool(report.wrong_elements) is is_wrong


@pytest.mark.parametrize(("p", "d"), [("LBHNC", "contiguous"), ("contiguous", "LBHNC")])
def test_pages_of_one_size_are_in_other_groups(lab: Lab, p: str, d: str) -> None:
    prefill, decode = (_on(_spec("windows of 64 tokens", layout)) for layout in (p, d))

    _run(lab, prefill, decode).must_be("refused", "groups", "KVCACHED_CONTIGUOUS_LAYOUT=false")
