"""What a handshake has D prepare of a peer's memory, and of its own, however large P's cache is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case, EngineSpec
from .host import Lab
from .stage import Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_LAYERS = 3
_D = EngineSpec(layout="NHD", planned_blocks=32, layers=_LAYERS, block_tokens=64)
_ROWS = replace(_D, tensor_blocks=400, planned_blocks=24, allocation="contiguous")
#: Of keys and of values of each layer, from each of two ranks.
_A_BLOCK_OF_EACH = 2 * _LAYERS


def _case(prefill: EngineSpec, lab: Lab) -> Case:
    rows = replace(prefill, patched=prefill.is_kvcacheds)
    return Case("large", rows, replace(_D, patched=True), prompt_tokens=150)


def test_rows_of_all_layers_are_shown_as_one_block_of_each(lab: Lab) -> None:
    """All their memory in each of D's regions was layers times as much as a like pair has."""
    report = lab.run(_case(_ROWS, lab)).must_be("identical")
    assert 0 < report.prepared <= _A_BLOCK_OF_EACH


# D takes this P for one like it until a prompt has told otherwise
@pytest.mark.on(states_layout=True)
def test_unlike_blocks_are_shown_as_one(lab: Lab) -> None:
    report = lab.run(_case(replace(_D, block_tokens=16, planned_blocks=400), lab)).must_be(
        "identical"
    )
    assert 0 < report.prepared <= _A_BLOCK_OF_EACH


@pytest.mark.on(meets_one_rank=False)
def test_more_ranks_have_d_divide_nothing_of_its_own(lab: Lab) -> None:
    """The release prepares all of D's blocks once for each rank of a P with more."""
    report = lab.run(
        _case(replace(_D, block_tokens=16, planned_blocks=400, tp_size=2), lab)
    ).must_be("identical")
    assert 0 < report.prepared <= 2 * _A_BLOCK_OF_EACH


def test_a_like_peer_is_prepared_as_ever(lab: Lab) -> None:
    """The control of the counts above: the release reads it by descriptors of its own."""
    case = _case(replace(_D, planned_blocks=400), lab)

    report = lab.run(case).must_be("identical")
    assert report.prepared >= 400 * _LAYERS


@pytest.mark.on(since="0.24")
def test_peers_that_the_release_lets_go_of_are_forgotten_and_may_come_back(stage: Stage) -> None:
    spec = replace(_D, layers=2, planned_blocks=60)
    first, *others = (stage.prefill(replace(spec, block_tokens=16)) for _ in range(3))
    decode = stage.decode(spec)
    prompts = stage.prompts(4, 150)
    for prompt, actor in zip(prompts, (first, *others, first), strict=True):
        before = decode.unlike()
        decode.ask(*actor.compute(prompt))
        decode.must_receive(prompt)
        assert len(before) <= 2  # one that is let go of, and the one before it
        decode.age_peers()

    assert first.engine_id in decode.unlike()
    assert decode.wrong(*prompts)[0] == 0
