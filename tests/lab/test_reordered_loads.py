"""A D on a CPU, which reorders what it has read from other backends' rows, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from .case import EngineSpec
from .host import Lab
from .releases import registers_cpu_caches
from .stage import Actor, Raised, Stage
from .test_load_digests import spec
from .test_several_peers import SPEC, assert_identical, introduce
from .unlike_releases import ANY_HASH

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(reorders_for_cpu=True, has=registers_cpu_caches),
]

TOKENS = 150
CPU = spec(family="cpu")


@dataclass(frozen=True)
class Scene:
    """A D on a CPU, and what it reads from: rows, its like, and larger blocks of its like."""

    stage: Stage
    decode: Actor
    rows: Actor
    like: Actor
    larger: Actor

    def load(self, prefill: Actor) -> tuple[int, int]:
        """Has D load a prompt; its wrong and total elements."""
        prompt = self.stage.prompt(TOKENS)
        self.decode.ask(*prefill.compute(prompt))
        self.decode.must_receive(prompt)
        return self.decode.wrong(prompt)

    def checked(self) -> dict[str, int]:
        counts: dict[str, int] = self.decode.call("digests.counts")
        return counts


def play(stage: Stage, decode: EngineSpec) -> Scene:
    d = stage.start(decode, ANY_HASH)
    d.call("reorder_in_python")
    larger = replace(CPU, block_tokens=2 * CPU.block_tokens)
    rows, like, more = (stage.start(one, ANY_HASH) for one in (spec(), CPU, larger))
    return Scene(stage, d, rows, like, more)


@pytest.fixture
def scene(lab: Lab) -> Iterator[Scene]:
    with Stage(lab) as stage:
        yield play(stage, CPU)


@pytest.mark.on(ends_by_reordering=False)
def test_loads_of_each_peer_are_what_it_held_in_any_order(scene: Scene) -> None:
    """The one with rows sets the worker's flag for good."""
    introduced = (scene.like, scene.larger, scene.rows)
    prompts = scene.stage.prompts(len(introduced), TOKENS)
    introduce(scene.decode, prompts, *introduced)
    assert_identical(scene.decode, prompts, len(prompts) * TOKENS)
    for prefill in (scene.rows, scene.like, scene.larger, scene.rows, scene.like):
        scene.stage.load(prefill, scene.decode, TOKENS)


@pytest.mark.on(ends_by_reordering=False)
def test_loads_of_several_peers_at_once(scene: Scene) -> None:
    """Those of one peer's that arrive in the step of another's."""
    peers = (scene.rows, scene.like, scene.larger)
    for prefill in peers:
        scene.load(prefill)
    for _ in range(3):
        prompts = scene.stage.prompts(len(peers), TOKENS)
        asks = [ask for p, prompt in zip(peers, prompts, strict=True) for ask in p.compute(prompt)]
        scene.decode.ask(*asks)
        assert_identical(scene.decode, prompts, len(prompts) * TOKENS)


@pytest.mark.on(ends_by_reordering=False)
def test_what_is_reordered_is_not_checked_and_all_else_is(scene: Scene) -> None:
    """P's digests are of its own bytes, which a CPU's are not behind the reordering."""
    scene.load(scene.rows)
    before = scene.checked()
    scene.load(scene.rows)
    after_rows = scene.checked()
    assert after_rows["unchecked"] == before["unchecked"] + 1
    assert after_rows["checked"] == before["checked"]
    scene.load(scene.like)
    scene.load(scene.larger)
    assert scene.checked()["checked"] == after_rows["checked"] + 2


@pytest.mark.on(ends_by_reordering=False)
def test_stock_reorders_its_like_once_it_has_met_another(stage: Stage) -> None:
    """The negative control: it is what goes wrong without kvpatch, and it is seen."""
    scene = play(stage, replace(CPU, patched=False, settings=SPEC.settings))
    assert scene.load(scene.like)[0] == 0
    assert scene.load(scene.rows)[0] == 0
    wrong, total = scene.load(scene.like)
    assert wrong > total // 3, "keys, and values where they are in one row with them"


@pytest.mark.on(ends_by_reordering=True)
def test_rows_that_would_end_d_are_refused(lab: Lab) -> None:
    """0.26.0 takes another dimension for that of blocks."""
    with Stage(lab) as stage:
        scene = play(stage, CPU)
        prompt = stage.prompt(TOKENS)
        scene.decode.ask(*scene.rows.compute(prompt))
        scene.decode.must_fail(prompt)
        assert scene.load(scene.like)[0] == 0
    with Stage(lab) as stage, pytest.raises(Raised, match="out of DATA bounds"):
        stock = play(stage, replace(CPU, patched=False, settings=SPEC.settings))
        stock.load(stock.rows)
