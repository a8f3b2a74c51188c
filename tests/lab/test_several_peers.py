"""Several P and several D, alive at the same time, with transfers of all in flight at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from .case import EngineSpec
from .engine_api import Ask, Left, Prompt
from .host import Lab
from .releases import moves_full_blocks_only, states_layout
from .stage import Actor, Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

TOKENS = 150
SPEC = EngineSpec(
    block_tokens=64, planned_blocks=240, layers=2, kv_heads=2, head_dim=16, dtype="float32"
)


def engine(**more: object) -> EngineSpec:
    return EngineSpec(**{**vars(SPEC), **more})  # type: ignore[arg-type]


def unlike(release: str) -> tuple[EngineSpec, EngineSpec]:
    """Two engines that differ from `SPEC` in all that the release's handshake states."""
    if states_layout(release):
        return engine(block_tokens=32), engine(block_tokens=48, layout="NHD")
    # 0.10.0 can only have like peers.
    return engine(planned_blocks=230), engine(planned_blocks=250)


def is_told_apart(release: str) -> bool:
    """Whether the engines of `unlike` are unlike ones to D."""
    return not moves_full_blocks_only(release)


@contextmanager
def held(*actors: Actor) -> Iterator[None]:
    """While inside, no transfer from these ends."""
    try:
        for actor in actors:
            actor.hold()
        yield
    finally:
        for actor in actors:
            actor.go_on()


def introduce(decode: Actor, prompts: Sequence[Prompt], *prefill: Actor) -> None:
    """Has D read a prompt from each P: they have shaken hands, and D knows P."""
    for prompt, actor in zip(prompts, prefill, strict=True):
        decode.ask(*actor.compute(prompt))
    decode.must_receive(*prompts)


def names(prompts: Sequence[Prompt]) -> set[str]:
    return {prompt.name for prompt in prompts}


def loaded(prompt: Prompt, release: str) -> int:
    """Tokens that D loads of a prompt: 0.10.0 leaves the last, partial block to D."""
    rest = prompt.tokens % SPEC.block_tokens if moves_full_blocks_only(release) else 0
    return prompt.tokens - rest


def assert_identical(decode: Actor, prompts: Sequence[Prompt], tokens: int) -> None:
    """All of `tokens` arrived as P had them, and nothing else changed in D's memory."""
    decode.must_receive(*prompts)
    wrong, total = decode.wrong(*prompts)
    spec = decode.spec
    assert total == tokens * spec.layers * 2 * spec.kv_heads * spec.head_dim
    assert wrong == 0
    assert decode.strays() == 0
    assert left_of(decode, prompts) == Left()


def left_of(decode: Actor, prompts: Sequence[Prompt]) -> Left:
    """What D's worker still holds of transfers, and of metadata those of `prompts`.

    Of requests that only notify, releases from 0.11.1 on keep the metadata for ever.
    """
    left = decode.left()
    return replace(left, metadata=left.metadata & names(prompts))


@dataclass(frozen=True)
class Scene:
    """Three P (the last of them like the first D) and two D, for all tests of a release."""

    stage: Stage
    release: str
    prefill: tuple[Actor, Actor, Actor]
    decode: Actor
    other_decode: Actor


@pytest.fixture(scope="module")
def scene(lab: Lab) -> Iterator[Scene]:
    first, second = unlike(lab.release)
    small = {"block_tokens": 16, "planned_blocks": 320}
    other = engine(**small) if states_layout(lab.release) else engine()
    with Stage(lab) as stage:
        prefill = stage.prefill(first), stage.prefill(second), stage.prefill(SPEC)
        decode, other_decode = stage.decode(SPEC), stage.decode(other)
        introduce(decode, stage.prompts(3, TOKENS), *prefill)
        introduce(other_decode, stage.prompts(1, TOKENS), prefill[0])
        yield Scene(stage, lab.release, prefill, decode, other_decode)


def test_unlike_and_like_engines_feed_one_at_once(scene: Scene) -> None:
    prompts = scene.stage.prompts(9, TOKENS)
    computed: dict[str, list[Prompt]] = {}
    asks: list[Ask] = []
    for turn, prompt in enumerate(prompts):
        actor = scene.prefill[turn % 3]
        asks += actor.compute(prompt)
        computed.setdefault(actor.name, []).append(prompt)

    with held(*scene.prefill):
        tokens = scene.decode.ask(*asks)
        assert scene.decode.watch(*prompts, seconds=0.0).waiting == names(prompts)

    assert tokens == sum(loaded(prompt, scene.release) for prompt in prompts)
    assert_identical(scene.decode, prompts, tokens)
    for actor in scene.prefill:
        assert actor.heard(computed[actor.name]) == names(computed[actor.name])
    # The one that is like D stays with the release.
    unlike_ones = {actor.engine_id for actor in scene.prefill[:2]}
    assert scene.decode.unlike() == (unlike_ones if is_told_apart(scene.release) else set())


def test_one_feeds_two_at_once(scene: Scene) -> None:
    prefill, decoders = scene.prefill[0], (scene.decode, scene.other_decode)
    prompts = {decode.name: scene.stage.prompts(3, TOKENS) for decode in decoders}
    asks = {name: prefill.compute(*found) for name, found in prompts.items()}

    tokens = {}
    with held(prefill):
        for decode in decoders:
            tokens[decode.name] = decode.ask(*asks[decode.name])
        for decode in decoders:
            mine = prompts[decode.name]
            assert decode.watch(*mine, seconds=0.0).waiting == names(mine)

    for decode in decoders:
        assert_identical(decode, prompts[decode.name], tokens[decode.name])
    everything = [prompt for found in prompts.values() for prompt in found]
    assert prefill.heard(everything) == names(everything)


def test_sixteen_requests_of_a_pair_at_once(scene: Scene) -> None:
    prefill, lengths = scene.prefill[0], random.Random(16)
    prompts = [scene.stage.prompt(lengths.randrange(64, 200)) for _ in range(16)]
    asks = prefill.compute(*prompts)
    lengths.shuffle(asks)

    with held(prefill):
        tokens = scene.decode.ask(*asks)
        assert scene.decode.watch(*prompts, seconds=0.0).waiting == names(prompts)

    assert tokens == sum(loaded(prompt, scene.release) for prompt in prompts)
    assert_identical(scene.decode, prompts, tokens)
    assert prefill.heard(prompts) == names(prompts)


@pytest.mark.on(states_layout=True)
def test_a_p_of_many_ranks_that_hangs_leaves_room_for_another(stage: Stage) -> None:
    """A staging pool that a chunk of each of its ranks would fill."""
    settings = (("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", str(64 * 1024)))
    hangs = stage.prefill(engine(tp_size=4, kv_heads=4, block_tokens=32))
    well = stage.prefill(engine(kv_heads=4, block_tokens=16))
    decode = stage.decode(engine(kv_heads=4, settings=settings))
    introduce(decode, stage.prompts(2, TOKENS), hangs, well)
    late, prompt = stage.prompts(2, TOKENS)
    asks = hangs.compute(late)
    with held(hangs):
        decode.ask(*asks)
        assert decode.watch(late, seconds=0.2).waiting == names([late])
        decode.ask(*well.compute(prompt))
        decode.must_receive(prompt)
    decode.must_hold(late, prompt)


@pytest.mark.parametrize("chunk_tokens", [16, 80])
def test_a_prompt_computed_in_chunks(scene: Scene, chunk_tokens: int) -> None:
    """Chunks end inside blocks of both sides."""
    prompts = scene.stage.prompts(2, TOKENS)
    asks = scene.prefill[0].compute(*prompts, chunk_tokens=chunk_tokens)

    tokens = scene.decode.ask(*asks)

    assert tokens == sum(loaded(prompt, scene.release) for prompt in prompts)
    assert_identical(scene.decode, prompts, tokens)
    assert scene.prefill[0].heard(prompts) == names(prompts)


def test_another_requests_blocks_are_noticed(scene: Scene) -> None:
    """The negative control: requests whose answers were exchanged on the way."""
    first, second = scene.stage.prompts(2, TOKENS)
    asks = scene.prefill[0].compute(first, second)
    exchanged = [Ask(second, asks[0].answer), Ask(first, asks[1].answer)]

    scene.decode.ask(*exchanged)

    scene.decode.must_receive(first, second)
    wrong, total = scene.decode.wrong(first, second)
    assert wrong > 0.9 * total
