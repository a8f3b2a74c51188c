"""0.10.0 states no layout: D computes prompts of P's itself until P's cache has shown it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.patches import SLUGS

from .case import PEER_BLOCK_SIZE, UNSTATED_LAYOUT, Case, EngineSpec
from .host import Lab
from .releases import states_layout
from .stage import Raised, Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

PROVE = ((UNSTATED_LAYOUT, "prove"),)
SIZES = [(16, 16), (32, 16), (16, 48)]


@pytest.fixture(autouse=True)
def _release_is_mute(lab: Lab) -> None:
    if states_layout(lab.release):
        pytest.skip("this release states its layout")


def _spec(block_tokens: int, layout: str, **more: object) -> EngineSpec:
    base = EngineSpec("flash", layout, block_tokens, 40, kv_heads=2, head_dim=16)
    return replace(base, **more)  # type: ignore[arg-type]


def _case(p: int, d: int, layouts: tuple[str, str], **more: object) -> Case:
    prefill, decode = _spec(p, layouts[0]), _spec(d, layouts[1], **more)
    case = Case(f"P {layouts[0]} {p}, D {layouts[1]} {d}", prefill, decode, 4 * p * d // 16)
    return case.proving()


@pytest.mark.parametrize("values", ["same", "near"])
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize(("p", "d"), SIZES)
def test_a_layout_is_proven_by_content(
    lab: Lab, p: int, d: int, layouts: tuple[str, str], values: str
) -> None:
    """Near are values of which the last bits differ, up to some hundredths."""
    case = _case(p, d, layouts, own_values=values)

    report = lab.run(case.patched(*SLUGS, prefill=False))

    assert report.outcome == "identical", report
    assert report.moved_tokens == case.prompt_tokens


@pytest.mark.parametrize("dtype", ["fp8", "float32"])
def test_other_items(lab: Lab, dtype: str) -> None:
    case = _case(32, 16, ("HND", "NHD"), own_values="near", dtype=dtype)
    case = replace(case, prefill=replace(case.prefill, dtype=dtype))

    assert lab.run(case.patched(*SLUGS, prefill=False)).outcome == "identical"


def test_a_spoilt_cache_is_noticed(lab: Lab) -> None:
    case = _case(32, 16, ("HND", "NHD"))

    report = lab.run(case.patched(*SLUGS, prefill=False), sabotage="shift_block")

    assert report.outcome == "corrupt", report


@pytest.mark.parametrize("p", [16, 32])
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("HND", "HND")])
def test_layouts_that_are_said_to_be_alike(lab: Lab, p: int, layouts: tuple[str, str]) -> None:
    """Content still has to show the blocks; what must not happen where nobody says those either."""
    case = _case(p, 16, layouts)
    said = replace(case.decode, settings=((UNSTATED_LAYOUT, "same"),))
    is_true = layouts[0] == layouts[1]

    report = lab.run(replace(case, decode=said).patched(*SLUGS, prefill=False))
    assert report.outcome == ("identical" if is_true else "refused"), report

    said = replace(said, settings=(*said.settings, (PEER_BLOCK_SIZE, str(p))))
    report = lab.run(replace(case, decode=said).patched(*SLUGS, prefill=False))
    assert report.outcome == ("identical" if is_true else "corrupt"), report


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_peer_that_holds_other_things_is_never_read(lab: Lab, layout: str) -> None:
    """Another model, say: D computes all of its prompts, and P is told of each."""
    with Stage(lab) as stage:
        p = stage.prefill(_spec(16, layout))
        d = stage.decode(_spec(16, "HND", own_values="other", settings=PROVE))
        first, second = stage.prompts(2, 90)
        asks = p.compute(first, second)

        with pytest.raises(Raised, match="NothingProven"):
            d.introduce(asks[0])
        assert d.ask(asks[1]) == 0

        d.watch(second, seconds=1.0)
        assert p.heard([first, second]) == {first.name, second.name}
        assert d.written(second) == 0
        assert d.left().staging_bytes == 0


def test_short_prompts_prove_nothing(lab: Lab) -> None:
    """P names no block of a prompt shorter than one, and D computes it."""
    with Stage(lab) as stage:
        p = stage.prefill(_spec(32, "NHD"))
        d = stage.decode(_spec(16, "HND", settings=PROVE))
        prompts = stage.prompts(2, 20)
        for ask in p.compute(*prompts):
            assert 'remote_block_ids": []' in ask.answer
            assert d.ask(ask) == 0


def test_every_engine_is_proven_by_itself(lab: Lab) -> None:
    """A P that has come back, under another id, may have another layout."""
    with Stage(lab) as stage:
        d = stage.decode(_spec(16, "HND", settings=PROVE, planned_blocks=80))
        for layout in ("NHD", "HND", "NHD"):
            p = stage.prefill(_spec(16, layout))
            first, second, third = stage.prompts(3, 100)
            asks = p.compute(first, second, third)
            assert d.introduce(asks[0]) == 0
            assert d.ask(asks[1]) == d.ask(asks[2]) == 96
            assert d.watch(second, third).received == {second.name, third.name}
            assert p.heard([first, second, third]) == {first.name, second.name, third.name}
            assert d.wrong(second, third)[0] == 0
            p.die()


@pytest.mark.parametrize("step_tokens", [40, 2048])
@pytest.mark.parametrize(("p", "d"), SIZES)
def test_with_the_releases_own_scheduler(lab: Lab, p: int, d: int, step_tokens: int) -> None:
    """Also where the first step computes but a part of the prompt."""
    with Stage(lab) as stage:
        prefill = stage.prefill(_spec(p, "NHD"))
        own = {"own_scheduler": True, "step_tokens": step_tokens}
        decode = stage.decode(_spec(d, "HND", settings=PROVE, own_values="near", **own))
        first, second = stage.prompt(190), stage.prompt(192)
        asks = prefill.compute(first, second)

        assert decode.introduce(asks[0]) == 0
        decode.ask(asks[1])

        assert decode.watch(second).received == {second.name}
        wrong, total = decode.wrong(second)
        assert (wrong, total) == (0, 192 * 2 * 2 * 2 * 16)  # layers, K and V, heads, channels
        assert prefill.heard([first, second]) == {first.name, second.name}
