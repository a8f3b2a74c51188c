"""Handshakes under a key: pairs with the same one serve, and strangers get and end nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq

from kvpatch.core.settings import SIDE_CHANNEL_KEY, SIDE_CHANNEL_PLAIN
from tests.strangers import FIRST_BYTES, answer_to, sent_of_a_large_frame

from .case import EngineSpec
from .host import Lab
from .side_channel import ask, question
from .stage import Actor, Stage
from .test_several_peers import SPEC, TOKENS, assert_identical, loaded, unlike

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_ANSWER_MS = 3000
_REFUSED_SECONDS = 20.0
_MOST = 2**27


@dataclass(frozen=True)
class Keyed:
    """A stage, and two keys in files."""

    stage: Stage
    release: str
    key: Path
    other: Path

    def start(self, spec: EngineSpec, key: Path | None = None, **more: str) -> Actor:
        """An engine with a key, all patches and the release's own scheduler half."""
        named = {} if key is None else {SIDE_CHANNEL_KEY: str(key)}
        settings = tuple({**named, **more}.items())
        return self.stage.start(replace(spec, patched=True, settings=settings))


@pytest.fixture
def keyed(lab: Lab, tmp_path: Path) -> Iterator[Keyed]:
    paths = tmp_path / "key", tmp_path / "other"
    for path in paths:
        path.write_bytes(zmq.curve_keypair()[1])
    with Stage(lab) as stage:
        yield Keyed(stage, lab.release, *paths)


def serves(decode: Actor, prefill: Actor, keyed: Keyed) -> None:
    """Has D read a prompt from P, byte by byte."""
    prompts = keyed.stage.prompts(1, TOKENS)
    decode.ask(*prefill.compute(*prompts))
    assert_identical(decode, prompts, loaded(prompts[0], keyed.release))


def refuses(decode: Actor, prefill: Actor, keyed: Keyed, says: str = "") -> None:
    """Has D not read a prompt from P, and say why; <= 0.11.0 the load waits for ever."""
    prompts = keyed.stage.prompts(1, TOKENS)
    decode.ask(*prefill.compute(*prompts))
    end = time.monotonic() + _REFUSED_SECONDS
    while (seen := decode.watch(*prompts, seconds=0.2)).waiting and time.monotonic() < end:
        if says and any(says in line for line in seen.logged):
            break
    assert not seen.received
    assert says in "\n".join(seen.logged)


def test_a_pair_with_the_key_serves_like_and_heterogeneous_loads(keyed: Keyed) -> None:
    decode = keyed.start(SPEC, keyed.key)
    for spec in (SPEC, *unlike(keyed.release)):
        serves(decode, keyed.start(spec, keyed.key), keyed)


def test_strangers_get_no_answer_and_end_nothing(keyed: Keyed) -> None:
    prefill, open_one = keyed.start(SPEC, keyed.key), keyed.start(SPEC)
    good = question(keyed.release, 0)
    assert ask(open_one.port, b"", good, answer_ms=_ANSWER_MS), "a control: without a key it does"
    own, other = keyed.key.read_bytes(), keyed.other.read_bytes()
    assert ask(prefill.port, b"", good, answer_ms=_ANSWER_MS, keys=(own, own)), (
        "a control: with the key it does"
    )

    # Who has none, another, or P's half of the key and not that of a client.
    with ThreadPoolExecutor() as pool:
        found = pool.map(
            lambda keys: ask(prefill.port, b"", good, answer_ms=_ANSWER_MS, keys=keys),
            (None, (other, other), (own, other)),
        )
    assert list(found) == [None] * 3
    for name, sent in FIRST_BYTES.items():
        assert len(answer_to(prefill.port, sent)) <= 64, name  # ZMTP's greeting
    assert sent_of_a_large_frame(prefill.port, _MOST) < _MOST

    serves(keyed.start(SPEC, keyed.key), prefill, keyed)


def test_engines_without_the_same_key_refuse_one_another(keyed: Keyed) -> None:
    decode = keyed.start(SPEC, keyed.key)
    for key in (keyed.other, None):
        said = "does not have this engine's side channel key"
        refuses(decode, keyed.start(SPEC, key), keyed, said)
    refuses(keyed.start(SPEC), keyed.start(SPEC, keyed.key), keyed)


def test_while_it_is_rolled_out_all_talk_to_all(keyed: Keyed) -> None:
    rolling = {SIDE_CHANNEL_PLAIN: "true"}
    decode, old = keyed.start(SPEC, keyed.key, **rolling), keyed.start(SPEC)
    for prefill in (
        keyed.start(SPEC),
        keyed.start(SPEC, keyed.key, **rolling),
        keyed.start(SPEC, keyed.key),
    ):
        serves(decode, prefill, keyed)
    serves(old, keyed.start(SPEC, keyed.key, **rolling), keyed)
