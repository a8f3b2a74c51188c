"""P, D or both stop for a while in the middle of a load: a paused machine, a host that is moved.

Nothing fails that stock serves, and nothing wrong is served. Over TCP P has to take part in
every transfer, so that one that is stopped holds a load where it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from .engine_api import Ask, Prompt
from .host import Lab
from .releases import is_full
from .selection import some_of
from .stage import Actor, Stage
from .test_several_peers import SPEC, TOKENS, introduce, names

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(listens_in_scheduler=True),
]

_SECONDS = (5.0, 12.0, 25.0) if is_full() else (0.3,)
_TRANSPORTS = ("self,tcp", "self,sm,tcp") if is_full() else ("self,tcp",)
_POOL = (("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", "16384"))


@dataclass(frozen=True)
class Pair:
    """Two engines that know each other.

    Attributes:
        is_like: whether vLLM reads it, so that no read is queued.
        has_digests: whether each load is compared with what P had.
    """

    stage: Stage
    prefill: Actor
    decode: Actor
    is_like: bool
    has_digests: bool

    def fresh(self, count: int = 1) -> tuple[list[Prompt], list[Ask]]:
        prompts = self.stage.prompts(count, TOKENS)
        return prompts, self.prefill.compute(*prompts)


@pytest.fixture(scope="module", params=_TRANSPORTS)
def transports(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(lab: Lab, request: pytest.FixtureRequest, transports: str) -> Iterator[Pair]:
    kind, _, digest = request.param.replace(",", "").split()
    settings = (*SPEC.settings, ("KVPATCH_DIGEST", digest))
    spec = replace(SPEC, patched=True, settings=settings)
    unlike = replace(spec, block_tokens=32, settings=(*settings, *_POOL))
    with Stage(lab, transports) as stage:
        prefill, decode = stage.start(spec), stage.start(spec if kind == "like" else unlike)
        introduce(decode, stage.prompts(1, TOKENS), prefill)
        yield Pair(stage, prefill, decode, kind == "like", digest == "all")


def _queued(pair: Pair) -> list[Prompt]:
    """Reads that wait for others, which wait for P."""
    prompts, asks = pair.fresh(4)
    pair.prefill.hold()
    pair.decode.ask(*asks)
    return prompts


def _asked(pair: Pair) -> list[Prompt]:
    """A read that has asked for P's word before it begins."""
    prompts, asks = pair.fresh()
    pair.decode.call("digests.ask_first", True)
    pair.prefill.hold()
    pair.decode.ask(*asks)
    return prompts


def _reading(pair: Pair) -> list[Prompt]:
    """A read whose data is on its way."""
    prompts, asks = pair.fresh()
    pair.prefill.hold()
    pair.decode.ask(*asks)
    return prompts


def _checking(pair: Pair) -> list[Prompt]:
    """A read that waits for P's word, or has it and waits for P's digest."""
    if pair.has_digests:
        pair.prefill.call("digests.keep_from", True)
        prompts, asks = pair.fresh()
        pair.decode.ask(*asks)
        assert pair.decode.watch(*prompts, seconds=0.1).waiting == names(prompts)
        pair.prefill.hold()
        return prompts
    prompts, asks = pair.fresh()
    pair.decode.call("digests.stop_before_word", pair.prefill.process.pid)
    pair.decode.ask(*asks)
    while pair.is_like and not pair.prefill.is_stopped:  # D's steps look, and nobody else
        assert not pair.decode.watch(*prompts, seconds=0.05).failed
    pair.prefill.await_stop()
    return prompts


_STAGES = {"queued": _queued, "asked": _asked, "reading": _reading, "checking": _checking}


_KINDS = [f"{kind}, digests {digest}" for kind in ("like", "unlike") for digest in ("off", "all")]
#: A like pair's reads wait for nobody, and are not queued.
_ROWS = dict.fromkeys(
    (kind if when != "queued" else f"un{kind.removeprefix('un')}", when, who)
    for kind, when, who in some_of(_KINDS, _STAGES, ["P", "D", "both"])
)


@pytest.mark.parametrize("seconds", _SECONDS)
@pytest.mark.parametrize(("pair", "when", "who"), _ROWS, indirect=["pair"])
def test_a_load_is_served_behind_a_freeze(pair: Pair, when: str, who: str, seconds: float) -> None:
    prompts = _STAGES[when](pair)
    if who != "P":
        pair.decode.hold()
    if who == "D":
        pair.prefill.go_on()
    time.sleep(seconds)
    pair.decode.go_on()
    if who == "P":  # D looks all the while
        assert not pair.decode.watch(*prompts, seconds=0.1).failed
    pair.prefill.go_on()
    if when == "asked":
        pair.decode.call("digests.ask_first", False)
    if when == "checking" and pair.has_digests:
        pair.prefill.call("digests.keep_from", False)

    pair.decode.must_hold(*prompts)
    assert pair.prefill.heard(prompts) == names(prompts)
