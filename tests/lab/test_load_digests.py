"""Loads that are compared with what P had computed: good ones pass, and no wrong byte does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS
from kvpatch.load.read_request import DIGEST as FIELD

from .case import EngineSpec
from .engine_api import Ask, Prompt
from .host import Lab
from .releases import has_tpus
from .selection import in_turns
from .stage import Actor, Stage
from .test_several_peers import SPEC, assert_identical, introduce, loaded, names
from .test_state_ranks import _spec as of_states

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(listens_in_scheduler=True),
]

TOKENS = 150
#: Of a P that is not to let go of anything, and of one that soon does.
_LEASE_SECONDS, _SHORT_SECONDS = 60, 1
_SECONDS = 5.0
#: D polls for a digest that does not come some thousand times, however slow the machine is.
_LATE_SECONDS = 240.0
_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"


def spec(how: str = "all", **more: object) -> EngineSpec:
    settings = (*SPEC.settings, ("KVPATCH_DIGEST", how))
    more = {"settings": settings, "patched": True, **more}
    return replace(SPEC, **more)  # type: ignore[arg-type]


#: P, D, and how many ranks of P each of D's reads.
PAIRS = {
    "like": (spec(), spec(), 1),
    "64 to 32": (spec(), spec(block_tokens=32), 1),
    "32 to 128": (spec(block_tokens=32), spec(block_tokens=128), 1),
    "NHD to HND": (spec(layout="NHD"), spec(), 1),
    "2 ranks to 1": (spec(tp_size=2), spec(), 2),
    "1 rank to 2": (spec(), spec(tp_size=2), 1),
    "2 ranks to 2": (spec(tp_size=2), spec(tp_size=2), 1),
}
#: Every rank of P has all of the indexer's keys, and behind the last one each its own noise.
WHOLE = replace(
    EngineSpec(kinds=("", "indexer keys"), block_tokens=128, planned_blocks=20),
    settings=(("KVPATCH_DIGEST", "all"),),
    patched=True,
)


def _latents(tokens: int) -> EngineSpec:
    return spec(family="mla", block_tokens=tokens, head_dim=64, kv_heads=1, dtype="bfloat16")


def _turns(tokens: int) -> EngineSpec:
    """Heads of keys and of values by turns."""
    return spec(family="pallas", block_tokens=tokens, head_dim=128, dtype="bfloat16")


_indexed = replace(_latents(64), layout="NHD", layers=4, has_indexer=True, planned_blocks=40)


@dataclass
class Scene:
    """A P and a D that know each other, and what D has counted so far."""

    stage: Stage
    lab: Lab
    prefill: Actor
    decode: Actor
    counted: dict[str, int]
    tokens: int

    def fresh(self) -> tuple[Prompt, Ask]:
        prompt = self.stage.prompt(self.tokens)
        (ask,) = self.prefill.compute(prompt)
        return prompt, ask

    def load_rightly(self) -> None:
        """A fresh prompt, which is received and is what P has."""
        prompt, ask = self.fresh()
        self.decode.ask(ask)
        self.decode.must_hold(prompt)
        assert self.decode.strays() == 0

    def assert_told(self, prompt: Prompt) -> None:
        """P need not hold a prompt any longer; of a like pair D's steps say so."""
        end = time.monotonic() + 6 * _SECONDS
        while not self.prefill.heard([prompt], seconds=0.1):
            assert time.monotonic() < end, "P is not told"
            self.decode.call("idle", 1)

    def fail_handed_on(self) -> None:
        """A fresh prompt, whose blocks P writes to once it has its digests: its load fails."""
        prompt, ask = self.fresh()
        assert self.prefill.call("digests.made", prompt.name) == "made"
        self.prefill.call("hand_on", prompt.name)
        self.decode.ask(ask)
        self.decode.must_fail(prompt)

    def ask_spoilt(self, how: str, reads: int) -> Prompt:
        """A fresh prompt, of which wrong bytes come once it has been read."""
        prompt, ask = self.fresh()
        assert self.prefill.call("digests.made", prompt.name) == "made"
        self.decode.call("ask_spoilt", [ask], how, reads)
        return prompt

    def assert_counted(self, **found: int) -> None:
        """What D's ranks have counted since the last time, each for itself."""
        found = {**dict.fromkeys(self.counted, 0), **found}
        end = time.monotonic() + _SECONDS  # a load that fails on one rank goes on at the other
        while True:
            now = self.decode.call("digests.counts")
            since = {name: now[name] - self.counted[name] for name in now}
            if since == found or time.monotonic() > end:
                self.counted = now
                assert since == found
                return
            self.decode.call("idle", 1)


def scene(
    lab: Lab,
    stage: Stage,
    prefill: EngineSpec,
    decode: EngineSpec,
    tokens: int = TOKENS,
    lease_seconds: int = _LEASE_SECONDS,
) -> Scene:
    p = stage.start(
        replace(prefill, settings=(*prefill.settings, (_TIMEOUT, str(lease_seconds)))),
        {"kv_lease_duration": lease_seconds},
    )
    d = stage.start(decode)
    introduce(d, [stage.prompt(tokens)], p)
    return Scene(stage, lab, p, d, d.call("digests.counts"), tokens)


@pytest.fixture(scope="module", params=PAIRS)
def pair(lab: Lab, request: pytest.FixtureRequest) -> Iterator[tuple[Scene, int]]:
    prefill, decode, reads = PAIRS[request.param]
    with Stage(lab) as stage:
        yield scene(lab, stage, prefill, decode), reads * decode.tp_size


def test_good_loads_are_checked(pair: tuple[Scene, int]) -> None:
    """And identical, as without digests."""
    scene, _ = pair
    prompt, ask = scene.fresh()

    scene.decode.ask(ask)

    assert_identical(scene.decode, [prompt], loaded(prompt, scene.lab.release))
    scene.assert_counted(checked=scene.decode.spec.tp_size)
    assert scene.prefill.heard([prompt]) == names([prompt])


@pytest.mark.parametrize("how", ["flip", "swap", "layer"])
def test_wrong_bytes_fail_the_load(pair: tuple[Scene, int], how: str) -> None:
    """And are told of by their place; the next load is good."""
    scene, reads = pair
    prompt = scene.ask_spoilt(how, reads)

    seen = scene.decode.watch(prompt)
    assert seen.failed == names([prompt]), seen
    alarm = next(line for line in seen.logged if prompt.name in line)
    assert "is not what P had computed" in alarm
    assert "layers.1." in alarm if how != "swap" else "tokens 0 to" in alarm
    # The bytes are those of one rank of D's, or of both.
    ranks = scene.decode.spec.tp_size
    wrong = 1 if how == "flip" else ranks
    scene.assert_counted(checked=ranks - wrong, alarm=wrong)
    scene.assert_told(prompt)
    test_good_loads_are_checked(pair)


def test_blocks_that_p_has_written_to_since_fail_the_load(pair: tuple[Scene, int]) -> None:
    """P still holds them, so that its word says nothing of it."""
    scene, _ = pair
    scene.fail_handed_on()
    scene.assert_counted(alarm=scene.decode.spec.tp_size)


@pytest.mark.parametrize("ranks", [(4, 1), (1, 4)])
def test_heads_that_several_ranks_share_are_checked(
    stage: Stage, lab: Lab, ranks: tuple[int, int]
) -> None:
    """Whichever of them they were read from."""
    found = scene(lab, stage, *(spec(tp_size=size) for size in ranks))
    found.load_rightly()
    found.assert_counted(checked=ranks[1])


@pytest.mark.parametrize(
    ("ranks", "way"), in_turns([(4, 1), (4, 2), (3, 1)], ["direct", "staged"]), ids=str
)
def test_each_head_is_read_from_one_rank(
    stage: Stage, lab: Lab, ranks: tuple[int, int], way: str
) -> None:
    """Whose copies are unlike in the last bits: it is the first one's, and not one of each."""
    heads = 1 if ranks[0] == 3 else 2
    always = (*spec().settings, ("KVPATCH_TRANSFER", way))
    p, d = (spec(tp_size=size, kv_heads=heads, settings=always) for size in ranks)
    found = scene(lab, stage, p, replace(d, block_tokens=32))
    found.prefill.call("part_copies")
    before = found.decode.left()
    for _ in range(3):
        prompt, ask = found.fresh()
        found.decode.ask(ask)
        found.decode.must_hold(prompt)
        found.assert_counted(checked=ranks[1])
        assert found.prefill.heard([prompt]) == names([prompt]), "all of its ranks are told"
    assert found.decode.left() == before
    found.decode.must_fail(found.ask_spoilt("layer", heads))
    found.assert_counted(alarm=ranks[1])


#: Kinds of caches: P, D, the first release that has them, and what a good load counts as.
KINDS = {
    "fp8": (
        spec(dtype="fp8"), spec(layout="NHD", block_tokens=48, dtype="fp8"), "0.11.1", "checked",
    ),
    "latents": (_latents(32), _latents(16), "0.11.1", "checked"),
    "a TPU's": (_turns(32), _turns(64), "0.11.1", "checked"),
    "indexers": (_indexed, _indexed, "0.11.1", "checked"),
    "cross-layer": (
        spec(layout="BLHNC", block_tokens=32), spec(layout="LHBNC"), "0.29", "checked",
    ),
    **{
        # The last block is left out where nobody knows whose it is.
        f"whole, {p} ranks to {d}": (
            replace(WHOLE, tp_size=p), replace(WHOLE, tp_size=d), "0.29",
            "partly" if p > d else "checked",
        )
        for p, d in ((1, 1), (2, 1), (1, 2), (2, 2))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_cache_is_checked(stage: Stage, lab: Lab, name: str) -> None:
    """A good load passes, and one of blocks that are another request's by then fails."""
    p, d, since, counts = KINDS[name]
    has_turns = p.family != "pallas" or has_tpus(lab.release)
    if Version(lab.release) < Version(since) or not has_turns:
        pytest.skip("this release has no such caches")
    found = scene(lab, stage, p, d, 300)
    found.load_rightly()
    found.assert_counted(**{counts: d.tp_size})
    found.fail_handed_on()


def test_a_digest_is_made_while_p_computes_other_prompts(stage: Stage, lab: Lab) -> None:
    """D waits for it, and not for what the step behind P's answer computes."""
    found = scene(lab, stage, *PAIRS["like"][:2])
    first, second = stage.prompts(2, TOKENS)
    assert found.prefill.call("digest_while_computing", first, second) == "made"


def test_reads_in_the_engines_steps_are_checked(stage: Stage, lab: Lab) -> None:
    """Without a thread, as with one."""
    prefill, decode, _ = PAIRS["64 to 32"]
    decode = replace(decode, settings=(*decode.settings, ("KVPATCH_PROGRESS", "step")))
    found = scene(lab, stage, prefill, decode)
    prompt, ask = found.fresh()
    found.decode.ask(ask)
    assert_identical(found.decode, [prompt], loaded(prompt, lab.release))
    found.assert_counted(checked=1)
    found.fail_handed_on()
    found.assert_counted(alarm=1)


@pytest.mark.parametrize(("how", "kind"), in_turns(["flip", "swap", "layer"], ["like", "64 to 32"]))
def test_without_digests_they_are_received(stage: Stage, lab: Lab, kind: str, how: str) -> None:
    """The negative control."""
    off = (("KVPATCH_DIGEST", "off"),)
    prefill, decode, reads = PAIRS[kind]
    found = scene(lab, stage, replace(prefill, settings=off), replace(decode, settings=off))
    prompt, ask = found.fresh()
    assert FIELD not in json.loads(ask.answer)

    found.decode.call("ask_spoilt", [ask], how, reads)

    found.decode.must_receive(prompt)
    assert found.decode.wrong(prompt)[0] > 0
    found.assert_counted()


@pytest.mark.parametrize("kind", ["like", "64 to 32"])
def test_a_sample_is_checked(lab: Lab, kind: str) -> None:
    """Whichever side wants no more than that; blocks written to since are noticed."""
    prefill, decode, _ = PAIRS[kind]
    sample = (("KVPATCH_DIGEST", "sample"),)
    for p, d in ((sample, decode.settings), (prefill.settings, sample), (sample, sample)):
        with Stage(lab) as stage:
            found = scene(lab, stage, replace(prefill, settings=p), replace(decode, settings=d))
            found.load_rightly()
            found.assert_counted(checked=1)
            found.fail_handed_on()


@pytest.mark.parametrize(
    ("why", "kind"),
    in_turns(["P has them off", "a proxy leaves it out", "P is late"], ["like", "64 to 32"]),
)
def test_loads_without_a_digest_are_counted_as_such(
    stage: Stage, lab: Lab, kind: str, why: str
) -> None:
    """They are received: nothing is known against them."""
    prefill, decode, _ = PAIRS[kind]
    if why == "P has them off":
        prefill = replace(prefill, settings=(("KVPATCH_DIGEST", "off"),))
    found = scene(lab, stage, prefill, decode)
    if why == "P is late":
        found.prefill.call("digests.keep_from", True)
    prompt, ask = found.fresh()
    answer = json.loads(ask.answer)
    assert (FIELD in answer) == (why != "P has them off")
    if why == "a proxy leaves it out":
        del answer[FIELD]
    found.counted = found.decode.call("digests.counts")

    found.decode.ask(replace(ask, answer=json.dumps(answer)))

    assert not found.decode.watch(prompt, seconds=_LATE_SECONDS).waiting
    assert_identical(found.decode, [prompt], loaded(prompt, lab.release))
    found.assert_counted(unchecked=1)
    if why == "P is late":
        found.prefill.call("digests.keep_from", False)


@pytest.mark.parametrize("side", ["P", "D"])
def test_loads_through_a_host_buffer_are_counted_as_not_checked(
    stage: Stage, lab: Lab, side: str
) -> None:
    """Digests do not cover them, on either side."""
    plain, buffered = spec(), spec()
    buffered = replace(
        buffered,
        settings=(*buffered.settings, ("KVPATCH_HOST_BUFFER", "always")),
        own_scheduler=side == "P",
    )
    pair = (buffered, plain) if side == "P" else (plain, buffered)
    found = scene(lab, stage, *pair)
    prompt, ask = found.fresh()
    assert (FIELD in json.loads(ask.answer)) == (side == "D")
    found.decode.ask(ask)
    found.decode.must_hold(prompt)
    found.assert_counted(unchecked=1)


def test_stale_bytes_get_no_digest(stage: Stage, lab: Lab) -> None:
    """P's lease runs out, and its blocks are another request's, before it has digested them."""
    found = scene(lab, stage, *PAIRS["like"][:2], lease_seconds=_SHORT_SECONDS)
    found.prefill.call("digests.keep_from", True)
    prompt, ask = found.fresh()
    found.prefill.call("digests.note_holds")
    time.sleep(_SHORT_SECONDS + 0.1)
    assert found.prefill.heard([prompt]) == names([prompt]), "P has let go of it"
    found.prefill.call("hand_on", prompt.name)
    found.prefill.call("digests.keep_from", False)

    assert found.prefill.call("digests.made", prompt.name) == "none"

    found.decode.ask(ask)
    found.decode.must_fail(prompt)


_STATES = replace(of_states(1, "mamba2", 64), settings=(("KVPATCH_DIGEST", "all"),), patched=True)


def _states_scene(lab: Lab, stage: Stage, ranks: tuple[int, int], tokens: int) -> Scene:
    if Version(lab.release) < Version("0.18"):
        pytest.skip("this release's connector takes no recurrent state")
    if ranks[0] != ranks[1] and not FACTS[lab.release].has_channels_first:
        pytest.skip("this release's states are not read from other numbers of ranks")
    p, d = (replace(_STATES, tp_size=size) for size in ranks)
    found = scene(lab, stage, p, replace(d, block_tokens=tokens))
    found.load_rightly()  # before 0.20 what introduced P may be loaded only now
    found.counted = found.decode.call("digests.counts")
    return found


@pytest.mark.on(since="0.19")  # else: no state is loaded
@pytest.mark.parametrize(("ranks", "tokens"), in_turns([(1, 1), (2, 2)], [32, 64]), ids=str)
def test_recurrent_states_are_checked(
    stage: Stage, lab: Lab, ranks: tuple[int, int], tokens: int
) -> None:
    """A wrong bit in the last layer's fails the load, as one of attention's does."""
    found = _states_scene(lab, stage, ranks, tokens)
    found.load_rightly()
    found.assert_counted(checked=ranks[1])

    prompt = found.ask_spoilt("flip", ranks[1])

    seen = found.decode.watch(prompt)
    assert seen.failed == names([prompt]), seen
    assert any("its recurrent state" in line for line in seen.logged)
    found.assert_counted(checked=ranks[1] - 1, alarm=1)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_states_of_other_ranks_are_not_and_attention_is(
    stage: Stage, lab: Lab, ranks: tuple[int, int]
) -> None:
    """Each rank has its own share of a state: the load is called unchecked, unless it is wrong."""
    found = _states_scene(lab, stage, ranks, 64)
    found.load_rightly()
    found.assert_counted(unchecked=ranks[1])

    found.fail_handed_on()
    found.assert_counted(alarm=ranks[1])


def _assert_copies_are_no_alarm(found: Scene) -> None:
    """Of what several of P's ranks have, each has bits of its own from now on."""
    found.prefill.call("part_copies")
    for _ in range(3):
        prompt, ask = found.fresh()
        assert found.prefill.call("digests.made", prompt.name) == "made"
        found.decode.ask(ask)
        found.decode.must_receive(prompt)
    assert found.decode.call("digests.counts")["alarm"] == 0


@pytest.mark.on(reads_states_by_latents=True)
def test_latents_of_a_rank_that_is_read_for_its_states_are_no_alarm(stage: Stage, lab: Lab) -> None:
    """Each of P's ranks has a latent whole, with bits of its own, and D has one of them."""
    p, d = (
        replace(
            _STATES,
            tp_size=size,
            state_kind="kimi delta attention",
            family="mla",
            layout="NHD",
            head_dim=64,
            dtype="float32",
        )
        for size in (2, 1)
    )
    found = scene(lab, stage, p, d)
    _assert_copies_are_no_alarm(found)


@pytest.mark.on(since="0.20")  # else: has no such ranks
@pytest.mark.parametrize("ranks", [(4, 1), (4, 2)], ids=["4 to 1", "4 to 2"])
def test_heads_of_a_rank_that_is_read_for_its_states_are_no_alarm(
    stage: Stage, lab: Lab, ranks: tuple[int, int]
) -> None:
    """Two of P's ranks have a head, each with bits of its own, and the release reads the first."""
    p, d = (replace(_STATES, tp_size=size, kv_heads=2) for size in ranks)
    found = scene(lab, stage, p, d)
    _assert_copies_are_no_alarm(found)
    found.fail_handed_on()
