"""What clients send as ``kv_transfer_params``: no engine ends by it, and good requests pass.

D's scheduler, connector and workers are the release's own. Bad parameters are P's own answer,
which a proxy would pass on, with something in it that P does not say; the answers of every
release's own P pass in all other tests of the lab.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from kvpatch.patches import SLUGS
from tests.bad_params import bad_params

from .host import Lab
from .releases import must_prove
from .stage import Actor, Raised, Stage
from .test_several_peers import SPEC, introduce

pytestmark = pytest.mark.lab

#: What layout P has is not what is asked here (0.10.0 states none).
OWN = replace(
    SPEC, own_scheduler=True, settings=(*SPEC.settings, ("KVPATCH_UNSTATED_LAYOUT", "same"))
)
#: Whole blocks: 0.10.0 loads no others.
TOKENS = 192
_SETS = 1000
_PART = 50

#: What a field of P's answer is replaced by.
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**17),
    st.sampled_from([-1, 0, 2**31, 2**32, 2**63, 2**64, 10**20, 10**30, 1.0, 1e308, -0.5]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["x", "", "0", "1", "7" * 300, "\ud800", "a\nb", "x" * 100_000, "HB:a"]),
    st.lists(st.one_of(st.integers(-1, 300), st.text(max_size=2)), max_size=4),
    st.lists(st.lists(st.integers(-1, 300), max_size=4), max_size=3),
    st.lists(st.just(0), min_size=500, max_size=500),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
_FIELDS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_block_size",
    "remote_registration_generation",
    "remote_prefill_cached_tokens",
    "transfer_mode",
    "something_else",
)
_CHANGES = st.lists(
    st.tuples(st.sampled_from(_FIELDS), st.one_of(st.just("left out"), _ODD)),
    min_size=1,
    max_size=3,
)


def changed(answer: str, changes: list[tuple[str, Any]]) -> str:
    """P's answer with other fields, as JSON."""
    params = json.loads(answer)
    for field, value in changes:
        if value == "left out":
            params.pop(field, None)
        else:
            params[field] = value
    # Hands are shaken with P alone: whoever may be behind another port is not asked.
    if isinstance(params.get("remote_port"), int) and 0 < params["remote_port"] < 2**16:
        params["remote_port"] = json.loads(answer)["remote_port"]
    return json.dumps(params)


@cache
def draws(count: int) -> list[tuple[int, list[tuple[str, Any]], Any]]:
    """So many changes of P's answer, the same ones in every run and for every release."""
    found: list[tuple[int, list[tuple[str, Any]], Any]] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 9), _CHANGES, _ODD)
    def draw(which: int, changes: list[tuple[str, Any]], odd: Any) -> None:
        found.append((which, changes, odd))

    draw()
    return found


def drawn(answer: str, count: int) -> list[str]:
    """So many sets of parameters; one in ten has nothing of P's."""
    return [changed(answer, c) if which else json.dumps(odd) for which, c, odd in draws(count)]


@pytest.fixture
def stage(lab: Lab) -> Iterator[Stage]:
    with Stage(lab) as opened:
        yield opened


def _offer(decode: Actor, texts: list[str]) -> list[str]:
    """What becomes of prompts with these parameters; an error names those that it came with."""
    try:
        return list(decode.call("offer", texts, TOKENS))
    except Raised as error:
        last = str(decode.call("last_offer"))
        raise AssertionError(f"{last[:500]} ended the engine: {error}") from error


def test_no_engine_ends_by_generated_parameters(stage: Stage) -> None:
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    (own,) = prefill.compute(stage.prompt(TOKENS))

    texts = drawn(own.answer, _SETS)
    found = [
        outcome
        for start in range(0, len(texts), _PART)
        for outcome in _offer(decode, texts[start : start + _PART])
    ]

    assert len(found) >= _SETS * 0.9
    # Some of them are good enough to be loaded, and the others are computed.
    assert {"WAITING_FOR_REMOTE_KVS", "FINISHED_LENGTH_CAPPED"} <= set(found), set(found)
    _assert_served(stage, prefill, decode)


@pytest.mark.one_per_generation
def test_each_wrong_field_is_named_and_nothing_is_loaded(stage: Stage) -> None:
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    (own,) = prefill.compute(stage.prompt(TOKENS))
    bad = bad_params(json.loads(own.answer))

    found = _offer(decode, [json.dumps(params) for _, params in bad])

    logged = decode.call("logged")
    assert len(bad) >= 60
    assert set(found) == {"FINISHED_LENGTH_CAPPED"}, [
        b for b, outcome in zip(bad, found, strict=True) if outcome != "FINISHED_LENGTH_CAPPED"
    ]
    assert len(logged) == len(bad)
    for (field, _), line in zip(bad, logged, strict=True):
        assert f"kv_transfer_params.{field}" in line or field == "kv_transfer_params", line
        assert len(line) < 1000
        assert line.isprintable()
    _assert_served(stage, prefill, decode)


@pytest.mark.one_per_generation
def test_without_the_patch_they_end_the_engine(stage: Stage) -> None:
    """What is mended here, and that the tests see it."""
    prefill = stage.prefill(SPEC)
    patches = tuple(slug for slug in SLUGS if slug != "transfer_params")
    decode = stage.start(replace(OWN, patched=True, patches=patches))
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    (own,) = prefill.compute(stage.prompt(TOKENS))

    for changes in (
        [("remote_block_ids", 7)],
        [("remote_engine_id", ["a"])],
        [("do_remote_decode", True), ("remote_num_tokens", "x")],
    ):
        with pytest.raises(Raised, match="TypeError|AttributeError"):
            decode.call("offer", [changed(own.answer, changes)], TOKENS)


@pytest.mark.one_per_generation
@pytest.mark.parametrize(("listed", "is_p"), [("10.0.0.0/8,localhost", False), ("127.0.0.1", True)])
def test_d_connects_to_listed_peers_alone(stage: Stage, lab: Lab, listed: str, is_p: bool) -> None:
    settings = (*OWN.settings, ("KVPATCH_ALLOWED_PEERS", listed))
    prefill, decode = stage.prefill(SPEC), stage.decode(replace(OWN, settings=settings))
    (own,) = prefill.compute(stage.prompt(TOKENS))

    (outcome,) = _offer(decode, [own.answer])

    is_told = any("KVPATCH_ALLOWED_PEERS" in line for line in decode.call("logged"))
    assert is_told is not is_p
    if not must_prove(decode.spec, lab.release):  # D computes a first prompt there anyway
        assert outcome == ("WAITING_FOR_REMOTE_KVS" if is_p else "FINISHED_LENGTH_CAPPED")


@pytest.mark.one_per_generation
@pytest.mark.parametrize("patched", [True, False])
def test_p_that_saves_to_its_own_buffer_needs_no_address(
    stage: Stage, lab: Lab, patched: bool
) -> None:
    if not Version("0.10.1") <= Version(lab.release) < Version("0.13"):
        pytest.skip("this release saves a prompt without asking who reads it")
    prefill = stage.decode(OWN, patched=patched)
    prefill.call("save_to_own_buffer")

    if patched:
        assert _offer(prefill, ['{"do_remote_decode": true}']) == ["FINISHED_LENGTH_CAPPED"]
    else:
        with pytest.raises(Raised, match="KeyError"):
            prefill.call("offer", ['{"do_remote_decode": true}'], TOKENS)


@pytest.mark.one_per_generation
@pytest.mark.parametrize("blocks", ["others", "too few", "another group"])
def test_blocks_that_p_does_not_have_fail_one_load(stage: Stage, lab: Lab, blocks: str) -> None:
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    prompt = stage.prompt(TOKENS)
    (ask,) = prefill.compute(prompt)
    params = json.loads(ask.answer)
    ids = params["remote_block_ids"]
    is_flat = not isinstance(ids[0], list)
    if blocks == "another group":
        if is_flat:
            pytest.skip("block ids are one list here")
        params["remote_block_ids"] = [*ids, [1]]
    else:
        first = ids if is_flat else ids[0]
        wrong = [SPEC.planned_blocks, *first[1:]] if blocks == "others" else first[:1]
        params["remote_block_ids"] = wrong if is_flat else [wrong]

    loaded = decode.ask(replace(ask, answer=json.dumps(params)))
    seen = decode.watch(prompt, seconds=3)

    assert not seen.received, seen
    assert not loaded or any(" name" in line for line in seen.logged), seen
    assert not loaded or decode.written(prompt) == 0
    _assert_served(stage, prefill, decode)


def _assert_served(stage: Stage, prefill: Actor, decode: Actor) -> None:
    """The next good request is read whole."""
    prompt = stage.prompt(TOKENS)
    decode.ask(*prefill.compute(prompt))
    seen = decode.watch(prompt)
    assert seen.received == {prompt.name}, seen
    assert decode.wrong(prompt)[0] == 0
