"""Every release serves like pairs byte for byte, stock and with kvpatch on.

The negative controls show for each release that a comparison can fail: a view
shifted by a block, a layer that was not copied, one flipped bit.
"""

from __future__ import annotations

import pytest

from .case import Case, Sabotage
from .cases import LAYOUTS, like_pairs
from .host import Lab
from .releases import moves_full_blocks_only
from .selection import on_every_release

pytestmark = pytest.mark.lab

_CASES = {case.name: case for layout in LAYOUTS for case in like_pairs(layout)}


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


@pytest.mark.parametrize("sabotage", ["shift_block", "skip_layer", "flip_byte"])
@pytest.mark.parametrize("name", ["HND four at once", "NHD some of it cached"])
def test_a_spoilt_cache_is_noticed(lab: Lab, name: str, sabotage: Sabotage) -> None:
    case = _CASES[name]
    report = lab.run(case, sabotage=sabotage).must_be("corrupt")
    moved = report.total_elements * report.moved_tokens // tokens_held(case, lab.release)
    spoilt = {
        "flip_byte": case.n_requests,
        "skip_layer": moved // case.decode.layers,
        "shift_block": report.total_elements,
    }[sabotage]
    # Some of the noise under it is right by chance: 1 of 65536 elements.
    assert 0.99 * spoilt <= report.wrong_elements <= spoilt
