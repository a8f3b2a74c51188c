"""A P without kvpatch, whose lease runs out while D is held up: D counts the lease by its clock.

The fault is a real one: P has given the blocks to another request, and says nothing of it. Stock
answers with HTTP 200 from that request's keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.patches import SLUGS

from .case import PEER_BLOCK_SIZE
from .engine_api import Prompt
from .host import Lab
from .releases import states_block_size, states_layout
from .stage import Actor, Stage
from .test_several_peers import SPEC, TOKENS, assert_identical, introduce, loaded, names
from .test_stale_blocks import (
    UNLIKE,
    Scene,
    _assert_computed,
    _assert_nothing_wrong_is_cached,
    prefill,
)

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: Longer than any release's lease by default, and shorter than any.
_TOO_LONG, _SOME = 3600.0, 10.0


@pytest.fixture(scope="module", params=UNLIKE)
def kind(lab: Lab, request: pytest.FixtureRequest) -> str:
    if request.param == "unlike" and not states_layout(lab.release):
        pytest.skip("no unlike pair here")
    return str(request.param)


@pytest.fixture(scope="module")
def scene(lab: Lab, kind: str) -> Iterator[Scene]:
    """P has a short lease, and D the release's own."""
    with Stage(lab) as stage:
        declared = (PEER_BLOCK_SIZE, str(UNLIKE[kind].block_tokens))  # <= 0.11.0 nobody else says
        actor = prefill(stage, UNLIKE[kind], patched=False)
        decode = stage.decode(replace(SPEC, settings=(*SPEC.settings, declared)))
        introduce(decode, stage.prompts(1, TOKENS), actor)
        scene = Scene(stage, lab.release, {(kind, False): actor}, decode)
        _load_one(scene, actor)
        yield scene


def _load_one(scene: Scene, actor: Actor) -> Prompt:
    """Has D load a prompt, by whose wait its scheduler knows how far clocks are apart."""
    prompt, ask = scene.fresh(actor)
    scene.decode.ask(ask)
    scene.decode.must_receive(prompt)
    return prompt


def _of(scene: Scene, kind: str) -> Actor:
    return scene.prefill[kind, False]


def _wait_before(scene: Scene, seconds: float) -> None:
    scene.decode.call("wait_before", seconds)


def test_a_load_that_ends_after_the_lease_is_not_taken(scene: Scene, kind: str) -> None:
    """On releases <= 0.11.0 no single load can fail: it waits until its client gives up."""
    prompt, ask = scene.stale(_of(scene, kind))
    _wait_before(scene, _TOO_LONG)

    scene.decode.ask(ask)

    can_fail = states_block_size(scene.release)
    seen = scene.decode.watch(prompt, seconds=60.0 if can_fail else 0.5)
    _wait_before(scene, 0.0)
    assert (seen.failed if can_fail else seen.waiting) == names([prompt]), seen
    assert not seen.received


def test_a_load_that_ends_before_it_is_served(scene: Scene, kind: str) -> None:
    prompt, ask = scene.fresh(_of(scene, kind))
    _wait_before(scene, _SOME)

    scene.decode.ask(ask)

    assert_identical(scene.decode, [prompt], loaded(prompt, scene.release))
    _wait_before(scene, 0.0)


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
def test_who_switches_the_check_off_has_no_clock_either(stage: Stage, lab: Lab, kind: str) -> None:
    on = tuple(slug for slug in SLUGS if slug != "stale_blocks")
    actor = prefill(stage, UNLIKE[kind], patched=False)
    decode = stage.decode(replace(SPEC, patched=True, patches=on))
    introduce(decode, stage.prompts(1, TOKENS), actor)
    scene = Scene(stage, lab.release, {}, decode)
    _load_one(scene, actor)
    prompt, ask = scene.fresh(actor)
    _wait_before(scene, _TOO_LONG)

    decode.ask(ask)

    assert_identical(decode, [prompt], loaded(prompt, lab.release))


@pytest.mark.on(listens_in_scheduler=True)  # else: <= 0.11.0 P cannot say where its tables are
def test_where_p_gives_its_word_no_clock_is_looked_at(stage: Stage, lab: Lab, kind: str) -> None:
    """P's answer was long on its way, and P holds the blocks all the same."""
    spec = replace(UNLIKE[kind], patched=True)
    actor, decode = stage.start(spec), stage.decode(SPEC)
    introduce(decode, stage.prompts(1, TOKENS), actor)
    scene = Scene(stage, lab.release, {(kind, False): actor}, decode)
    prompt, ask = scene.fresh(actor)
    _wait_before(scene, _TOO_LONG)

    decode.ask(ask)

    assert_identical(decode, [prompt], loaded(prompt, lab.release))


@pytest.mark.on(since="0.13")  # else: all loads that fail are computed, or none
def test_d_computes_the_load(stage: Stage, lab: Lab, kind: str) -> None:
    """Whatever the policy for transfers says; D's scheduler is the release's own."""
    actor = prefill(stage, SPEC, patched=False)
    decode = stage.decode(replace(UNLIKE[kind], own_scheduler=True, load_failure_policy="fail"))
    introduce(decode, stage.prompts(1, TOKENS), actor)
    scene = Scene(stage, lab.release, {(kind, False): actor}, decode)
    first = _load_one(scene, actor)
    decode.call("loaded", [first.name])
    prompt, ask = scene.stale(actor)
    _wait_before(scene, _TOO_LONG)

    decode.ask(ask)

    decode.must_fail(prompt)
    decode.call("loaded", [prompt.name])
    _assert_computed(decode, prompt)
    _assert_nothing_wrong_is_cached(decode, prompt)


@pytest.mark.on(listens_in_scheduler=False)  # else: the load fails, and D computes it
def test_what_has_waited_too_long_is_computed_where_no_load_can_fail(
    stage: Stage, lab: Lab
) -> None:
    """As behind a long queue; a worker that finds out too late could not end the load."""
    actor = prefill(stage, SPEC, patched=False)
    decode = stage.decode(replace(SPEC, own_scheduler=True))
    introduce(decode, stage.prompts(1, TOKENS), actor)
    scene = Scene(stage, lab.release, {("like", False): actor}, decode)
    for seconds, is_loaded in ((0.0, True), (_SOME, True), (_TOO_LONG, False)):
        prompt, ask = scene.fresh(actor)
        _wait_before(scene, seconds)

        (served,) = decode.complete(ask)

        assert served.status == "FINISHED_LENGTH_CAPPED"
        assert (served.computed < TOKENS) == is_loaded
        assert decode.wrong(prompt)[0] == 0


def test_d_knows_of_its_heartbeats(stage: Stage, lab: Lab) -> None:
    """From 0.22 on they extend P's lease; the release itself sends them, in D's steps."""
    actor = stage.start(SPEC)
    decode = stage.start(replace(SPEC, patched=True), {"kv_lease_duration": 5})
    introduce(decode, stage.prompts(1, TOKENS), actor)
    prompt = stage.prompt(TOKENS)

    decode.ask(*actor.compute(prompt))
    decode.watch(prompt)

    assert decode.call("beaten") == int(FACTS[lab.release].grants_leases)
