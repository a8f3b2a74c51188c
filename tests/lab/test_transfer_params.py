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

from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.patches import SLUGS

from .engine_api import Ask
from .host import Lab
from .stage import Actor, Raised, Stage
from .test_several_peers import SPEC, introduce

pytestmark = pytest.mark.lab

OWN = replace(SPEC, own_scheduler=True)
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
    stage.load(prefill, decode, TOKENS)


@pytest.mark.one_per_generation
def test_without_the_patch_they_end_the_engine(stage: Stage) -> None:
    """What is mended here, and that the tests see it."""
    prefill = stage.prefill(SPEC)
    patches = tuple(slug for slug in SLUGS if slug != "transfer_params")
    decode = stage.start(replace(OWN, patched=True, patches=patches))
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    (own,) = prefill.compute(stage.prompt(TOKENS))

    for changes in ([("remote_block_ids", 7)], [("remote_engine_id", ["a"])]):
        with pytest.raises(Raised, match="TypeError|AttributeError"):
            decode.call("offer", [changed(own.answer, changes)], TOKENS)


@pytest.mark.one_per_generation
@pytest.mark.parametrize(("listed", "is_p"), [("10.0.0.0/8,localhost", False), ("127.0.0.1", True)])
def test_d_connects_to_listed_peers_alone(stage: Stage, listed: str, is_p: bool) -> None:
    settings = (*OWN.settings, ("KVPATCH_ALLOWED_PEERS", listed))
    prefill, decode = stage.prefill(SPEC), stage.decode(replace(OWN, settings=settings))
    (own,) = prefill.compute(stage.prompt(TOKENS))

    (outcome,) = _offer(decode, [own.answer])

    is_told = any("KVPATCH_ALLOWED_PEERS" in line for line in decode.call("logged"))
    assert is_told is not is_p
    assert outcome == ("WAITING_FOR_REMOTE_KVS" if is_p else "FINISHED_LENGTH_CAPPED")


@pytest.mark.one_per_generation
@pytest.mark.on(since="0.10.1", before="0.13")  # else: nobody is asked who reads a prompt
@pytest.mark.parametrize("patched", [True, False])
def test_p_that_saves_to_its_own_buffer_needs_no_address(stage: Stage, patched: bool) -> None:
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
    stage.load(prefill, decode, TOKENS)


#: What a P of some release answers in a field that others do not have.
_OTHERS = {
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": TOKENS,
    "remote_block_size": SPEC.block_tokens,
    "remote_blocks_expiry_time": None,
    "remote_registration_generation": 0,
    "remote_request_id": "another",
    "transfer_mode": "pull",
}
#: What a proxy whose fields are never null sends in place of null, and of what is absent.
_ZEROS = {
    **dict.fromkeys(("dcp_size", "pp_size", "remote_num_tokens", "remote_block_size"), 0),
    "remote_blocks_expiry_time": 0.0,
    "remote_registration_generation": 0,
    "remote_request_id": "",
    "transfer_mode": "",
}
#: Long enough for what stock serves; what it does not serve it may never answer.
_STOCKS_SECONDS = 0.5

#: What is served, whatever stock makes of it.
_TYPED = ("text", "float", "zero", "another release's")

_Cell = tuple[str, str]


def _typed(value: Any, kind: type) -> Any:
    """A value with its numbers as texts or floats, as a proxy with other types sends them."""
    if isinstance(value, list):
        return [_typed(one, kind) for one in value]
    if isinstance(value, bool):
        return str(value).lower() if kind is str else int(value)
    return kind(value) if isinstance(value, int) else value


def _as_proxies_send(own: dict[str, Any], facts: ReleaseFacts) -> Iterator[tuple[_Cell, Any]]:
    """((field, how), what is sent in it): what proxies make of P's answer."""
    for field, value in (_OTHERS | own).items():
        is_own = field in own
        yield (field, "absent" if is_own else "another release's"), "left out" if is_own else value
        yield (field, "null"), None
        for how, kind in (("text", str), ("float", float)):
            if _typed(value, kind) != value or type(value) is int:
                yield (field, how), _typed(value, kind)
        if own.get(field) is None:
            yield (field, "zero"), _ZEROS[field]
        if field not in facts.params:
            yield (field, "odd"), ["odd"]


def _outcomes(lab: Lab, *, patched: bool) -> dict[_Cell, str]:
    """What becomes of each cell; a stage for each D, whose prompts have then no common prefixes."""
    with Stage(lab) as stage:
        pair = Pair(stage, FACTS[lab.release], patched=patched)
        own = json.loads(pair.ask().answer)
        return {cell: pair.outcome(cell) for cell, _ in _as_proxies_send(own, FACTS[lab.release])}


#: What an outcome begins with that no engine may have.
ENDS = "the engine ends"


class Pair:
    """A stock P, and a D that has met it; a new D where one has ended."""

    def __init__(self, stage: Stage, facts: ReleaseFacts, *, patched: bool) -> None:
        self._stage, self._facts, self._patched = stage, facts, patched
        self.prefill = stage.prefill(SPEC)
        self.decode = self._next()

    def _next(self) -> Actor:
        decode = self._stage.decode(OWN, patched=self._patched)
        introduce(decode, self._stage.prompts(1, TOKENS), self.prefill)
        return decode

    def ask(self) -> Ask:
        return self.prefill.compute(self._stage.prompt(TOKENS))[0]

    def outcome(self, cell: _Cell) -> str:
        """What becomes of a load whose parameters have one field as a proxy sends it."""
        ask = self.ask()
        own = json.loads(ask.answer)
        sent = dict(_as_proxies_send(own, self._facts))[cell]
        return self.outcome_of(replace(ask, answer=changed(ask.answer, [(cell[0], sent)])))

    def outcome_of(self, ask: Ask) -> str:
        """What becomes of a load with these parameters."""
        found = self._load(self.decode, ask)
        if self.decode.has_raised:
            self.decode = self._next()
        return found

    def ends(self, ask: Ask) -> bool:
        """True if these parameters end D, whatever else becomes of the load."""
        try:
            if self.decode.ask(ask):
                self.decode.watch(ask.prompt, seconds=20 if self._patched else _STOCKS_SECONDS)
        except Raised:
            self.decode = self._next()
            return True
        return False

    def _load(self, decode: Actor, ask: Ask) -> str:
        before = len(decode.call("logged"))
        try:
            loaded = decode.ask(ask)
            if not loaded:
                lines = decode.call("logged")[before:]
                is_refused = any("kv_transfer_params" in line for line in lines)
                return "refused" if is_refused else "computed"
            seen = decode.watch(ask.prompt, seconds=20 if self._patched else _STOCKS_SECONDS)
        except Raised as error:
            return f"{ENDS} by {error}"[:300]
        if not seen.received:
            return "failed" if seen.failed else "waiting"
        if decode.wrong(ask.prompt)[0]:
            return "corrupt"
        return (
            "read"
            if self.prefill.heard([ask.prompt], seconds=20 if self._patched else 1)
            else "kept"
        )


@pytest.mark.one_per_generation
def test_whatever_stock_serves_is_served(lab: Lab) -> None:
    """Every field of every release: absent, null, a text, a float, another release's.

    Stock's D has met P already: from then on it does without P's address, which no first one can.
    """
    ours, stocks = (_outcomes(lab, patched=patched) for patched in (True, False))
    found = {cell: (ours[cell], stocks[cell]) for cell in ours}

    served = {"read", "computed"}
    addresses = {(f"remote_{name}", "null") for name in ("host", "port")}
    assert sum(of_stock in served for _, of_stock in found.values()) > len(found) / 3, found
    for cell, (of_ours, of_stock) in found.items():
        assert of_ours in served | {"refused"}, (cell, found)
        assert of_ours in served or of_stock not in served or cell in addresses, (cell, found)
        # What a typed proxy sends is served, whatever stock makes of it.
        assert of_ours in served or cell[1] not in _TYPED, cell


@pytest.mark.one_per_generation
@pytest.mark.parametrize("kind", [str, float])
def test_a_first_prompt_through_a_typed_proxy(stage: Stage, kind: type) -> None:
    """All numbers of another type, and all fields of all releases, null where P sent none."""
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN)
    first, second = (_through_a_typed_proxy(stage, prefill, kind) for _ in range(2))

    decode.ask(first)
    decode.must_receive(first.prompt)
    assert decode.ask(second) == TOKENS, decode.call("logged")

    decode.must_hold(second.prompt)


def _through_a_typed_proxy(stage: Stage, prefill: Actor, kind: type) -> Ask:
    (ask,) = prefill.compute(stage.prompt(TOKENS))
    own = {name: _typed(value, kind) for name, value in json.loads(ask.answer).items()}
    return replace(ask, answer=json.dumps(dict.fromkeys(_OTHERS) | own))
