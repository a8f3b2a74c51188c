"""Every release serves like pairs byte for byte, stock and with kvpatch on.

The negative controls show for each release that a comparison can fail: a view
shifted by a block, a layer that was not copied, one flipped bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case, EngineSpec
from .host import Lab
from .releases import moves_full_blocks_only
from .selection import on_every_release

pytestmark = pytest.mark.lab


def pair(spec: EngineSpec, decode_blocks: int = 24) -> tuple[EngineSpec, EngineSpec]:
    """Two engines of one geometry; only their numbers of blocks differ."""
    return spec, replace(spec, planned_blocks=decode_blocks)


def like_pairs(layout: str) -> list[Case]:
    """One geometry on both sides, in `layout`: every kind of prompt."""
    p, d = pair(EngineSpec(layout=layout))
    big_p, big_d = pair(EngineSpec(layout=layout, block_tokens=64, dtype="float32"))
    small_p, small_d = pair(EngineSpec(layout=layout, dtype="fp8", layers=3, kv_heads=2))
    return [
        Case(f"{layout} one token", p, d, prompt_tokens=1),
        Case(f"{layout} one block", p, d, prompt_tokens=16),
        Case(f"{layout} seven blocks, not aligned", p, d, prompt_tokens=107),
        Case(f"{layout} some of it cached", p, d, prompt_tokens=57, prefix_hit_tokens=32),
        Case(f"{layout} all of it cached", p, d, prompt_tokens=48, prefix_hit_tokens=48),
        Case(f"{layout} four at once", p, d, prompt_tokens=70, n_requests=4),
        Case(f"{layout} blocks of 64, 4-byte items", big_p, big_d, prompt_tokens=150),
        Case(f"{layout} 1-byte items", small_p, small_d, prompt_tokens=40),
    ]


_CASES = {case.name: case for layout in ("HND", "NHD") for case in like_pairs(layout)}


def tokens_to_move(case: Case, release: str) -> int:
    """What D must load in all, from the prompts and the release's rule alone.

    A prompt that goes before is computed where D has to find out what P has.
    """
    rounded = case.decode.block_tokens if moves_full_blocks_only(release) else 1
    prompt = case.prompt_tokens - case.prompt_tokens % rounded
    return case.n_requests * max(0, prompt - case.prefix_hit_tokens)


def tokens_held(case: Case, release: str) -> int:
    """What D holds in all when it is done: loaded or from its prefix cache."""
    return tokens_to_move(case, release) + case.n_requests * case.prefix_hit_tokens


@pytest.mark.parametrize("side", ["stock", "kvpatch"])
@pytest.mark.parametrize("name", on_every_release(_CASES, ["HND some of it cached"]))
def test_like_pair_is_identical(lab: Lab, name: str, side: str) -> None:
    case = _CASES[name]
    report = lab.run(case.patched() if side == "kvpatch" else case).must_be(
        "identical", moved=tokens_to_move(case, lab.release)
    )
    assert (report.descriptors > 0) == (report.moved_tokens > 0)


@pytest.mark.parametrize("name", ["HND four at once", "NHD some of it cached"])
def test_a_spoilt_cache_is_noticed(lab: Lab, name: str) -> None:
    """The negative controls that the lab plays behind each identical load, and what they count."""
    case = _CASES[name]
    report = lab.run(case).must_be("identical")
    moved = report.total_elements * report.moved_tokens // tokens_held(case, lab.release)
    spoilt = {
        "a flipped bit": 1,
        "shifted by a block": report.total_elements,
        **{f"layer {layer} left out": moved // case.decode.layers for layer in (0, 1)},
    }
    assert report.noticed.keys() == spoilt.keys()
    for way, most in spoilt.items():
        # Some of the noise under it is right by chance: 1 of 65536 elements.
        assert 0.99 * most <= report.noticed[way] <= most, way
