"""Kinds of cache (docs/explanation/kinds.md) that no other test plays: alike, cut, and spoilt.

From 0.29 on releases lay out such caches themselves, from what a layer's spec says; before, each
model's runner did. kvpatch is on D; of what stays the release's it only lets peers pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec, Outcome, Report
from .host import Lab
from .releases import has_named_layouts, has_runners_rows

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: Blocks that hold one request of the longest kind, and some.
_LATENTS = EngineSpec("mla", "BLHNC", block_tokens=256, planned_blocks=12, layers=4, head_dim=64)
DEEPSEEK_V4 = replace(
    _LATENTS,
    kinds=("compressed", "compressed indexer", "window of latents", "compressor"),
    has_own_tables=True,
    planned_blocks=160,
)
#: The same where the model's runner lays it out.
RUNNERS_DEEPSEEK_V4 = replace(DEEPSEEK_V4, layout="HND")
_HEADS = EngineSpec("flash", "HND", planned_blocks=40, layers=2)
_POOLED = replace(_HEADS, kinds=("pooled",))
_BESIDE = EngineSpec("flash", "BLHNC", block_tokens=64, planned_blocks=30, layers=2)
_IDENTICAL: tuple[Outcome, str] = ("identical", "")
#: The release's own word.
_NO_ENGINE: tuple[Outcome, str] = ("refused", "cannot be partitioned into NIXL regions")


@dataclass(frozen=True)
class Model:
    """A model whose layers are of some kind.

    Attributes:
        cut: what becomes of a P of blocks twice as large, and the words for it.
        parts: into how many kernel blocks the backend cuts those.
        ranks: the same of unlike ranks, P's and D's.
        since: the first release that has it.
        registers_since: the first whose own connector takes a P of the larger blocks, stock as it
            is; before, no such engine starts.
        refuses_ranks_since: the first that refuses unlike ranks by itself, which it read rightly.
    """

    engine: EngineSpec
    cut: tuple[Outcome, str]
    ranks: Mapping[tuple[int, int], tuple[Outcome, str]]
    since: str = "0.29"
    registers_since: str = "0.29"
    refuses_ranks_since: str = "0.29"
    parts: int = 1
    prompt_tokens: int = 100


def _everywhere(outcome: Outcome, words: str) -> dict[tuple[int, int], tuple[Outcome, str]]:
    return {(2, 1): (outcome, words), (1, 2): (outcome, words)}


_MODELS = {
    # Its blocks are rows of all groups' layers; every rank has all of them.
    "deepseek-v4": Model(
        DEEPSEEK_V4,
        ("refused", "compressed latents of all tokens, then their scales, and move whole"),
        _everywhere(*_IDENTICAL),
        since="0.30",
        registers_since="0.32",
        prompt_tokens=300,
    ),
    # The same without what slides, of which 0.29's planner and connector make nothing.
    "latents": Model(
        replace(_LATENTS, kinds=("compressed", "compressed indexer")),
        ("refused", "registration: AssertionError"),  # the release's own: no such P starts
        _everywhere(*_IDENTICAL),
        prompt_tokens=300,
    ),
    # A ring has the region of the attention in whose place it lies: a D of more ranks reads half.
    "qsa": Model(
        replace(_BESIDE, kinds=("", "ring", "summary"), has_own_tables=True, layers=3),
        ("refused", "keys or summaries that stand for several tokens, and move whole"),
        {(2, 1): _IDENTICAL, (1, 2): ("refused", "a ring of what is not compressed yet, of which")},
        since="0.30",
        prompt_tokens=300,
    ),
    "summaries": Model(
        replace(_BESIDE, kinds=("", "summary")),
        ("refused", "keys or summaries that stand for several tokens, and move whole"),
        _everywhere(*_IDENTICAL),
        since="0.30",
        prompt_tokens=300,
    ),
    "minimax-m3": Model(
        replace(_HEADS, kinds=("", "indexer keys"), block_tokens=128, planned_blocks=20),
        _IDENTICAL,
        _everywhere(*_IDENTICAL),
        parts=2,
        prompt_tokens=300,
    ),
    "tiles": Model(
        replace(_HEADS, kinds=("tiles",)),
        ("refused", "packs keys by rules of its own"),
        _everywhere("refused", "move whole, never a share of their heads"),
    ),
    "nvfp4": Model(
        replace(_HEADS, kinds=("fp4",)),
        ("refused", "packed keys of all heads, then their scales, and values likewise, and move"),
        _everywhere("refused", "move whole, never a share of their heads"),
    ),
    "nvfp4 by head": Model(
        replace(_HEADS, kinds=("fp4 by head",), block_tokens=128, planned_blocks=20, head_dim=128),
        _IDENTICAL,
        _everywhere("refused", "re-sharding is not supported for NVFP4"),  # the release's words
        since="0.32",
        refuses_ranks_since="0.33",
        parts=2,
        prompt_tokens=300,
    ),
    "whisper": Model(
        _POOLED,
        ("refused", "several positions to a token, and move whole"),
        _everywhere(*_IDENTICAL),
    ),
    # Rows, of which a slot holds the keys, the values and their scales.
    "turboquant": Model(
        replace(_HEADS, layout="NHD", kinds=("packed",), head_dim=64),
        _IDENTICAL,
        _everywhere(*_IDENTICAL),
    ),
    # Two backends of rows made into one, with a name of its own.
    "composite": Model(
        replace(_HEADS, kinds=("composite",)), _IDENTICAL, _everywhere(*_IDENTICAL), since="0.30"
    ),
}


@pytest.fixture(params=_MODELS)
def model(lab: Lab, request: pytest.FixtureRequest) -> Model:
    found = _MODELS[request.param]
    if request.param == "deepseek-v4" and has_runners_rows(lab.release):
        cut: tuple[Outcome, str] = ("refused", "each block is a row of all layers")
        return replace(found, engine=RUNNERS_DEEPSEEK_V4, registers_since="0.24", cut=cut)
    if not has_named_layouts(lab.release) or Version(lab.release) < Version(found.since):
        pytest.skip("this release has no such cache, or lays it out in the model's runner")
    return found


def _play(lab: Lab, model: Model, prefill: Mapping[str, int], decode: Mapping[str, int]) -> Report:
    sides = (replace(model.engine, **side) for side in (prefill, decode))  # type: ignore[arg-type]
    case = Case(f"{model.engine.kinds}, P {prefill}, D {decode}", *sides, model.prompt_tokens)
    report = lab.on_d(case)
    assert report.noticed or report.outcome != "identical", report
    return report


def test_a_like_pair(lab: Lab, model: Model) -> None:
    decode = {"planned_blocks": model.engine.planned_blocks - 2}
    _play(lab, model, {}, decode).must_be("identical")


def test_other_blocks(lab: Lab, model: Model) -> None:
    """Kernel blocks of one size move whole, however many a block has."""
    twice = {"block_tokens": 2 * model.engine.block_tokens, "parts": model.parts}

    if Version(lab.release) < Version(model.registers_since):
        larger = replace(model.engine, **twice)  # type: ignore[arg-type]
        stock = lab.run(Case("larger blocks, stock", larger, larger, model.prompt_tokens))
        stock.must_be(*_NO_ENGINE)
        _play(lab, model, twice, {}).must_be(*_NO_ENGINE)
        return
    _play(lab, model, twice, {}).must_be(*model.cut)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_other_ranks(lab: Lab, model: Model, ranks: tuple[int, int]) -> None:
    p, d = ranks
    is_read = Version(lab.release) < Version(model.refuses_ranks_since)
    expected = _IDENTICAL if is_read else model.ranks[ranks]

    _play(lab, model, {"tp_size": p}, {"tp_size": d}).must_be(*expected)


@pytest.mark.on(has=has_runners_rows)
def test_rows_that_the_release_cuts(lab: Lab) -> None:
    """Of 512 tokens DeepSeek-V4's row of all layers is two of vLLM's blocks."""
    engine = replace(RUNNERS_DEEPSEEK_V4, block_tokens=512)
    case = Case("rows in two parts", engine, engine, 300)

    lab.run(case).must_be("identical")
    report = lab.run(case.patched())

    report.must_be("identical")
    assert report.noticed


# -- smaller blocks of pooled tokens (Whisper): behind one another they are a larger one ----------

_ENOUGH = replace(_POOLED, planned_blocks=100)
_JOINED = {
    "alone": _ENOUGH,
    "tokens before heads": replace(_ENOUGH, layout="NHD"),
    "beside rows": replace(_ENOUGH, kinds=("", "pooled")),
    # As Voxtral has them; kvpatch itself would read such a cache, but for these layers.
    "in windows": replace(
        _ENOUGH,
        kinds=("", "pooled window"),
        has_own_tables=True,
        window_tokens=(128, 0),
        window_shape=(4, 128),
    ),
}


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize("name", _JOINED)
def test_smaller_blocks_of_pooled_tokens(lab: Lab, name: str) -> None:
    """Left to the release where it joins smaller blocks rightly, from 0.32 on; else refused.

    A request with a prefix hit, which the release pairs wrongly, is mended as one of rows is.
    """
    engine = _JOINED[name]
    joins = Version(lab.release) >= Version("0.32")
    case = Case(f"pooled, {name}", engine, replace(engine, block_tokens=32), prompt_tokens=100)
    expected = _IDENTICAL if joins else ("refused", "several positions to a token, and move whole")

    # What makes it right to leave it: the release alone is.
    assert (lab.run(case).outcome == "identical") is joins
    lab.on_d(case).must_be(*expected)
    if not engine.is_hybrid:
        hit = replace(case, prefix_hit_tokens=32)
        assert lab.run(hit).outcome != "identical"
        lab.on_d(hit).must_be(*expected)


@pytest.mark.on(has_cache_groups=True, names_layouts=False)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_pooled_tokens_beside_rows_are_the_releases(lab: Lab, layout: str) -> None:
    """Their shape needs a type of the cache, and is none of a backend that kvpatch reads."""
    engine = replace(_ENOUGH, kinds=("", "pooled"), layout=layout)
    case = Case("pooled, like", engine, engine, prompt_tokens=100)
    lab.run(case).must_be("identical")

    lab.on_d(case).must_be("identical")
    lab.run(case.patched()).must_be("identical")
    for other in (replace(engine, block_tokens=32), replace(engine, tp_size=2)):
        for pair in ((engine, other), (other, engine)):
            unlike = Case("pooled, unlike", *pair, prompt_tokens=100)
            assert lab.on_d(unlike).outcome in ("identical", "refused"), unlike
