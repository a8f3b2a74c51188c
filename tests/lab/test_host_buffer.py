"""KV through a host buffer on P, on D and on both, by real connectors over real NIXL.

P has the release's own scheduler, block manager and prefix cache. The lab's caches lie in
host memory themselves, so that what is saved and placed is a copy all the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import PEER_BLOCK_SIZE, STORAGELESS, Case, EngineSpec
from .engine_api import Ask, Prompt
from .host import Lab
from .releases import has_tpus, moves_full_blocks_only, states_block_size
from .selection import on_every_release
from .stage import Actor, Stage
from .test_like_pairs import tokens_to_move

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

TOKENS = 150
BLOCK_TOKENS = 32
ALWAYS = (("KVPATCH_HOST_BUFFER", "always"),)
#: What the tests vary, and what they do not.
SPEC = EngineSpec(
    block_tokens=BLOCK_TOKENS, planned_blocks=80, layers=2, kv_heads=2, head_dim=16, dtype="float32"
)
#: Keys and values of 2 layers, 2 heads of 16 channels of float32.
BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 2 * 16 * 4
REQUEST_BLOCKS = -(-TOKENS // BLOCK_TOKENS)


def buffered(blocks: int | None = None, **more: object) -> EngineSpec:
    """An engine with a host buffer, of so many blocks beside the null block."""
    size = () if blocks is None else (("KVPATCH_HOST_BUFFER_BYTES", _bytes(blocks)),)
    return EngineSpec(
        **{**vars(SPEC), "patched": True, "settings": ALWAYS + size, **more}  # type: ignore[arg-type]
    )


def _bytes(blocks: int) -> str:
    return str((blocks + 1) * BLOCK_BYTES)


def prefilling(blocks: int | None = None, **more: object) -> EngineSpec:
    return buffered(blocks, own_scheduler=True, **more)


PAIRS = {
    "P": (prefilling(), SPEC),
    "D": (SPEC, buffered()),
    "both": (prefilling(), buffered()),
    "P, in chunks": (prefilling(step_tokens=48), SPEC),
    "P with a small buffer": (prefilling(3 * REQUEST_BLOCKS), SPEC),
    "D in chunks": (
        SPEC,
        buffered(settings=(*ALWAYS, ("KVPATCH_STAGING_BYTES", str(2 * BLOCK_BYTES)))),
    ),
}
UNLIKE = {
    "128 to 32": (prefilling(block_tokens=128), buffered()),
    "32 to 128": (prefilling(), buffered(block_tokens=128)),
    "NHD to HND": (prefilling(layout="NHD"), buffered()),
}


def stated(pair: tuple[EngineSpec, EngineSpec], release: str) -> tuple[EngineSpec, EngineSpec]:
    """With kvpatch at P where D cannot tell it from vLLM's own mirror (0.13 to 0.15).

    There the lab's engines believe in CUDA, and host memory of CUDA's that D can read is a mirror.
    """
    p, d = pair
    is_open = FACTS[release].encodes_metadata
    if p.patched or not is_open or Version(release) >= Version("0.16"):
        return pair
    return replace(p, patched=True, patches=("unlike_engines",)), d


def case(name: str, pair: tuple[EngineSpec, EngineSpec], **more: object) -> Case:
    return Case(name, *pair, **{"prompt_tokens": TOKENS, "n_requests": 3, **more})  # type: ignore[arg-type]


def _of_shape(family: str, layout: str, head_dim: int) -> tuple[EngineSpec, EngineSpec]:
    sizes = {"family": family, "head_dim": head_dim, "dtype": "bfloat16", "layout": layout}
    return prefilling(**sizes), buffered(**sizes)


def _alike() -> Iterator[Case]:
    """Pairs whose handshakes every release understands."""
    yield from (case(name, pair) for name, pair in PAIRS.items())
    for prompt in (1, 31, 32, 33, 128):
        yield case(f"both, {prompt} tokens", PAIRS["both"], prompt_tokens=prompt)
    for side in ("P", "D", "both"):
        yield case(f"{side}, behind a hit", PAIRS[side], prefix_hit_tokens=2 * BLOCK_TOKENS)
    yield case("latents", _of_shape("mla", "NHD", 64))
    yield case("FlashInfer", _of_shape("flashinfer", "HND", 16))
    yield case("two ranks", (prefilling(tp_size=2), buffered(tp_size=2)))


_ALIKE = {one.name: one for one in _alike()}


@pytest.mark.parametrize("name", on_every_release(_ALIKE, ["both"]))
def test_like_pair_is_identical(lab: Lab, name: str) -> None:
    prefill, decode = stated((_ALIKE[name].prefill, _ALIKE[name].decode), lab.release)
    wanted = replace(_ALIKE[name], prefill=prefill, decode=decode)

    lab.run(wanted).must_be("identical", moved=tokens_to_move(wanted, lab.release))


@pytest.mark.on(has=has_tpus)
def test_a_tpus_shape(lab: Lab) -> None:
    """Of which HND is stated, and not what is."""
    lab.run(case("pallas", _of_shape("pallas", "HND", 128))).must_be("identical")


@pytest.mark.on(loads_whole_blocks_only=False)
@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_pair_is_identical(lab: Lab, name: str) -> None:
    if "to HND" not in name and not states_block_size(lab.release):
        pytest.skip("this release's handshake does not state what sets these apart")
    wanted = case(name, UNLIKE[name])

    lab.run(wanted).must_be("identical", moved=tokens_to_move(wanted, lab.release))


@pytest.mark.on(since="0.20")  # else: no cache groups, or P frees a block that D looks at (<= 0.19)
def test_windows(lab: Lab) -> None:
    """Several cache groups over shared tensors: a block of any of them is a row."""
    windows = {"window_tokens": (0, 64), "layers": 4, "dtype": "bfloat16", "own_scheduler": True}
    pair = buffered(**windows), buffered(**windows)

    for prompt in (40, TOKENS, 300):
        lab.run(case("windows", pair, prompt_tokens=prompt, n_requests=1)).must_be("identical")


def test_a_device_that_the_release_does_not_know(lab: Lab) -> None:
    """A platform from elsewhere, whose runner hands over no copies: nothing is set for it."""
    strange = replace(SPEC, device="npu", own_scheduler=True)
    stock = case("a device of its own", (strange, replace(strange, own_scheduler=False)))

    report = lab.run(stock.patched()).must_be("identical")
    report = lab.run(stock).must_be("refused")
    # 0.10.0 asks nobody, and NIXL cannot have what it calls VRAM.
    assert moves_full_blocks_only(lab.release) or "npu" in report.detail, report


XLA = {"device": STORAGELESS, "layout": "NHD"}
# Such a device makes one NaN of all, in floats of 2 bytes.
LATENT = {"family": "mla", "head_dim": 64, "dtype": "bfloat16", "holds_numbers": True, **XLA}
STORAGELESS_PAIRS = {
    "both": (prefilling(**XLA), buffered(**XLA), 0),
    "P": (prefilling(**XLA), buffered(layout="NHD"), 0),
    "P, HND asked for": (prefilling(device=STORAGELESS), buffered(), 0),
    "128 to 32, a prefix that D has": (
        prefilling(block_tokens=128, **XLA),
        buffered(**XLA),
        2 * BLOCK_TOKENS,
    ),
    "32 to 128": (prefilling(**XLA), buffered(block_tokens=128, **XLA), 0),
    "latent": (prefilling(**LATENT), buffered(**LATENT), 0),
}


@pytest.mark.parametrize("name", STORAGELESS_PAIRS)
def test_tensors_without_a_storage(lab: Lab, name: str) -> None:
    """Of a stand-in for torch_xla's, that copies whole blocks and does nothing else."""
    *pair, hit = STORAGELESS_PAIRS[name]
    is_unlike = pair[0].block_tokens != pair[1].block_tokens or "HND" in name
    if is_unlike and (moves_full_blocks_only(lab.release) or not states_block_size(lab.release)):
        pytest.skip("this release's handshake does not state what sets these apart")
    wanted = case(name, (pair[0], pair[1]), prefix_hit_tokens=hit)

    lab.run(wanted).must_be("identical", moved=tokens_to_move(wanted, lab.release))


@pytest.mark.on(loads_whole_blocks_only=False)  # else: 0.10.0's connector is handed no copies
def test_a_platforms_own_copies_are_not_called(stage: Stage, lab: Lab) -> None:
    scene = scene_of(stage, lab, planned_blocks=77)
    prefill = scene.prefill
    assert prefill.call("hand_over") == 0
    prompts = stage.prompts(3, TOKENS)
    prefill.call("begin", prompts)

    scene.read(scene.work(prompts))

    assert prefill.call("own_calls") == 0


# --- one request at a time ---------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """P with room for four requests in its host buffer, and a stock D."""

    stage: Stage
    release: str
    prefill: Actor
    decode: Actor

    def read(self, asks: Sequence[Ask], *, look_for_strays: bool = True) -> None:
        """Has D read, and P hear of it."""
        self.prefill.call("tick")  # in which its workers learn what to wait for
        prompts = [ask.prompt for ask in asks]
        tokens = self.decode.ask(*asks)
        assert tokens == sum(loaded(prompt, self.release) for prompt in prompts)
        self.decode.must_receive(*prompts)
        wrong, total = self.decode.wrong(*prompts)
        assert total == tokens * SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim
        assert wrong == 0
        assert not look_for_strays or self.decode.strays() == 0
        assert self.prefill.heard(prompts) == {prompt.name for prompt in prompts}

    def work(self, prompts: Sequence[Prompt]) -> list[Ask]:
        """What P can answer by now."""
        return self.answered(prompts, "work")

    def answered(self, prompts: Sequence[Prompt], how: str = "answers") -> list[Ask]:
        """What P has answered since the last time."""
        answers = self.prefill.call(how)
        return [Ask(p, answers[p.name]) for p in prompts if p.name in answers]

    def host_blocks(self) -> dict[str, int]:
        found: dict[str, int] = self.prefill.call("host_blocks")
        return found


def loaded(prompt: Prompt, release: str) -> int:
    """Tokens that D loads: 0.10.0 leaves the last, partial block to D."""
    rest = prompt.tokens % BLOCK_TOKENS if moves_full_blocks_only(release) else 0
    return prompt.tokens - rest


ROOM = 4 * REQUEST_BLOCKS


def scene_of(stage: Stage, lab: Lab, blocks: int | None = ROOM, **of_p: object) -> Scene:
    """P with a host buffer of so many blocks, and a stock D whose cache has room for all."""
    prefill = stage.start(prefilling(blocks, **of_p))
    decode = stage.prefill(replace(SPEC, planned_blocks=400))
    return Scene(stage, lab.release, prefill, decode)


@pytest.fixture
def scene(stage: Stage, lab: Lab) -> Scene:
    return scene_of(stage, lab, planned_blocks=200)


def test_an_abort_in_the_middle_of_a_prompt(stage: Stage, lab: Lab) -> None:
    scene = scene_of(stage, lab, planned_blocks=200, step_tokens=BLOCK_TOKENS)
    prefill = scene.prefill
    lost, kept = stage.prompts(2, TOKENS)
    prefill.call("begin", [lost])
    prefill.call("tick")
    prefill.call("tick")
    assert scene.host_blocks()["held"] == 2
    prefill.call("scheduler.abort", lost.name)
    assert scene.host_blocks() == {"free": ROOM, "waiting": 0, "held": 0}

    prefill.call("begin", [kept])
    scene.read(scene.work([kept]))


def test_preemption_gives_host_blocks_back(stage: Stage, lab: Lab) -> None:
    """A request that D will read makes way for one that was there first, and starts again."""
    # With five blocks each they would have one too few: the null block is nobody's.
    scene = scene_of(stage, lab, None, planned_blocks=2 * REQUEST_BLOCKS)
    prefill = scene.prefill
    own, read = stage.prompt(TOKENS + BLOCK_TOKENS), stage.prompt(TOKENS)
    prefill.call("scheduler.limit_chunks", BLOCK_TOKENS)
    prefill.call("begin_own", [own])
    prefill.call("begin", [read])

    held = []
    asks: list[Ask] = []
    while not asks:
        assert len(held) < 3 * REQUEST_BLOCKS, held
        prefill.call("tick")
        held.append(scene.host_blocks()["held"])
        asks = [ask for ask in scene.answered([read]) if ask.answer != "null"]

    # Up to four blocks, then none, and again from the first one on.
    assert held[:5] == [1, 2, 3, 4, 0], held
    assert scene.host_blocks()["held"] == -(-loaded(read, lab.release) // BLOCK_TOKENS)
    scene.read(asks)
    assert scene.host_blocks() == {"free": 2 * REQUEST_BLOCKS - 1, "waiting": 0, "held": 0}


@pytest.mark.on(frees_blocks_later=True)  # else: blocks are freed at once
def test_preemption_beside_a_step_gives_host_blocks_back(stage: Stage, lab: Lab) -> None:
    """vLLM takes the blocks from a request whose step is under way, and frees them behind it."""
    scene = scene_of(stage, lab, None, step_tokens=48, schedules_ahead=True)
    prefill = scene.prefill
    prompt = stage.prompt(TOKENS)
    prefill.call("begin", [prompt])
    prefill.call("tick")
    assert scene.host_blocks()["held"] > 0
    assert prefill.call("preempt_ahead", prompt.name)["held"] == 0
    asks: list[Ask] = []
    for _ in range(2 * REQUEST_BLOCKS):
        prefill.call("tick")
        asks += scene.answered([prompt])
    assert asks, "P has answered nothing"
    scene.read(asks)


@pytest.mark.parametrize("answer", [2, 5])
def test_an_answer_of_more_than_one_token(stage: Stage, lab: Lab, answer: int) -> None:
    """P writes on into the prompt's last block while the others are in their rows."""
    scene = scene_of(stage, lab, answer_tokens=answer)
    prefill = scene.prefill
    prompts = stage.prompts(3, TOKENS)
    prefill.call("begin", prompts)

    scene.read(scene.work(prompts))

    assert scene.host_blocks() == {"free": ROOM, "waiting": 0, "held": 0}


def test_an_answer_that_goes_on_in_another_block(stage: Stage, lab: Lab) -> None:
    """P's rows are then more than the prompt's, which a patched D tells by its tokens."""
    tokens = REQUEST_BLOCKS * BLOCK_TOKENS - 2
    prefill = stage.start(prefilling(ROOM, answer_tokens=5))
    decode = stage.start(
        buffered(planned_blocks=99, settings=(*ALWAYS, (PEER_BLOCK_SIZE, str(BLOCK_TOKENS))))
    )
    scene = Scene(stage, lab.release, prefill, decode)
    prompts = stage.prompts(2, tokens)
    prefill.call("begin", prompts)

    scene.read(scene.work(prompts))


@pytest.mark.parametrize("tokens", [TOKENS, REQUEST_BLOCKS * BLOCK_TOKENS])
def test_what_is_answered_is_there_while_the_next_step_is_under_way(
    stage: Stage, lab: Lab, tokens: int
) -> None:
    """<= 0.11.0 a step that is scheduled ahead computes a token more than was asked for."""
    scene = scene_of(stage, lab, planned_blocks=99, schedules_ahead=True)
    prefill, decode = scene.prefill, scene.decode
    prompts = stage.prompts(3, tokens)
    prefill.call("begin", prompts)

    answers = prefill.call("work_ahead")
    asks = [Ask(prompt, answers[prompt.name]) for prompt in prompts]
    decode.ask(*asks)
    seen = decode.watch(*prompts)
    beyond = prefill.call("catch_up")

    assert seen.received == {prompt.name for prompt in prompts}, seen
    assert decode.wrong(*prompts)[0] == 0
    assert beyond == (3 if Version(lab.release) < Version("0.11.1") else 0)
    prefill.call("tick")
    assert prefill.heard(prompts) == {prompt.name for prompt in prompts}
    assert scene.host_blocks() == {"free": ROOM, "waiting": 0, "held": 0}


#: From 0.11.1 to 0.15 the release's MultiConnector hands over no handshake.
_IN_MULTI = pytest.mark.on(
    has=lambda release: not Version("0.11.1") <= Version(release) < Version("0.16")
)


@_IN_MULTI
def test_in_a_multi_connector(lab: Lab) -> None:
    pair = prefilling(ROOM, in_multi=True), buffered(in_multi=True)
    for wanted in (pair, (pair[0], SPEC), (SPEC, pair[1])):
        lab.run(case("in a MultiConnector", wanted)).must_be("identical")


@_IN_MULTI
def test_host_blocks_are_taken_and_given_back_in_a_multi_connector(stage: Stage, lab: Lab) -> None:
    scene = scene_of(stage, lab, in_multi=True, planned_blocks=200)
    prompts = stage.prompts(6, TOKENS)
    scene.prefill.call("begin", prompts)

    first = scene.work(prompts)
    assert len(first) < len(prompts)
    scene.read(first)
    scene.read(scene.work(prompts))

    assert scene.host_blocks() == {"free": ROOM, "waiting": 0, "held": 0}


@pytest.mark.on(since="0.20")  # else: no cache groups, or P frees a block that D looks at (<= 0.19)
def test_tensors_that_layers_share_are_there_once(lab: Lab) -> None:
    """The hybrid allocator's: four layers in two tensors are two in the buffer."""
    windows = {"window_tokens": (0, 64), "layers": 4, "own_scheduler": True}
    with Stage(lab) as stage:
        prefill = stage.start(buffered(20, **windows))

        found = prefill.call("buffer_bytes")

    # As in BLOCK_BYTES, which is of two layers; four would not fit so many.
    assert found == {"size": 21 * BLOCK_BYTES, "held": 21 * BLOCK_BYTES, "blocks": 21}


def test_requests_come_go_and_fail_at_random(scene: Scene) -> None:
    """90 prompts of any length, many given up on in the queue or in the middle.

    Those that are longer than the buffer are refused, or given up on before they can be.
    """
    chance = random.Random(7)
    scene.prefill.call("scheduler.limit_chunks", 2 * BLOCK_TOKENS)
    lengths = [chance.randint(1, TOKENS) for _ in range(70)] + 20 * [5 * TOKENS]
    chance.shuffle(lengths)
    prompts = [scene.stage.prompt(tokens) for tokens in lengths]
    ahead = list(prompts)
    running: list[Prompt] = []
    served = cancelled = refused = 0

    while ahead or running:
        for _ in range(min(len(ahead), chance.randint(0, 6))):
            running.append(ahead.pop(0))
            scene.prefill.call("begin", running[-1:])
        for _ in range(chance.randint(0, 3)):
            scene.prefill.call("tick")
        asks = scene.answered(running)
        gone = {ask.prompt.name for ask in asks}
        running = [prompt for prompt in running if prompt.name not in gone]
        for prompt in [p for p in running if chance.random() < 0.3]:
            scene.prefill.call("scheduler.abort", prompt.name)
            running.remove(prompt)
            cancelled += 1
        # 0.10.0 publishes nothing of what is shorter than a block.
        asks = [ask for ask in asks if loaded(ask.prompt, scene.release)]
        refused += sum("kvpatch_refused" in ask.answer for ask in asks)
        asks = [ask for ask in asks if "kvpatch_refused" not in ask.answer]
        scene.read(asks, look_for_strays=False)
        served += len(asks)
        assert scene.host_blocks()["held"] <= ROOM

    assert min(served, cancelled) > 10 and refused > 2, (served, cancelled, refused)
    assert scene.decode.strays() == 0
    assert scene.host_blocks() == {"free": ROOM, "waiting": 0, "held": 0}
    assert scene.prefill.call("booked") == set()


def test_a_prefix_that_p_has_is_not_copied_again(scene: Scene) -> None:
    first, *others = scene.stage.prompts(3, TOKENS)
    again = replace(first, name=f"{first.name}-again")
    scene.prefill.call("watch_saves")
    scene.prefill.call("begin", [first])
    scene.read(scene.work([first]))
    copied = scene.prefill.call("copied")
    scene.prefill.call("begin", [again, *others])

    scene.read(scene.work([again, *others]))

    blocks = loaded(first, scene.release) // BLOCK_TOKENS
    partial = 0 if moves_full_blocks_only(scene.release) else 1
    whole = TOKENS // BLOCK_TOKENS
    assert copied == blocks + partial
    # Of the repeated one only what is not in whole blocks.
    assert scene.prefill.call("copied") - copied == 2 * (whole + partial) + partial


def test_a_request_larger_than_the_buffer_is_left_to_d(scene: Scene) -> None:
    large, small = scene.stage.prompt(TOKENS * 5), scene.stage.prompt(TOKENS)
    scene.prefill.call("begin", [large, small])

    asks = scene.work([large, small])

    refused, served = asks
    assert (refused.prompt, served.prompt) == (large, small)
    why = json.loads(refused.answer)["kvpatch_refused"]
    blocks = loaded(large, scene.release) // BLOCK_TOKENS
    blocks += bool(loaded(large, scene.release) % BLOCK_TOKENS)
    assert f"needs {blocks * BLOCK_BYTES} bytes" in why
    assert f"there are {ROOM * BLOCK_BYTES}" in why
    assert f"KVPATCH_HOST_BUFFER_BYTES to {_bytes(blocks)}" in why
    assert scene.decode.ask(refused) == 0, "a stock D computes what it is told of like this"
    scene.read([served])
    assert scene.host_blocks() == {"free": ROOM, "waiting": 0, "held": 0}


@pytest.mark.parametrize("how", ["skip", "shift"])
def test_a_spoilt_save_is_noticed(scene: Scene, how: str) -> None:
    """The negative control: what is not in its row is not right on D."""
    prompts = scene.stage.prompts(2, TOKENS)
    scene.prefill.call("spoil_saves", how)
    scene.prefill.call("begin", prompts)
    scene.decode.ask(*scene.work(prompts))

    assert not scene.decode.watch(*prompts).waiting
    assert scene.decode.wrong(*prompts)[0] > 0
