"""What P's kvpatch says beside its release: on its way out, and as D takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS
from kvpatch.peer import side_channel_key
from kvpatch.peer.agent_metadata import StatedBlocks
from kvpatch.peer.other_releases import Address
from kvpatch.peer.statement import (
    BLOCKS,
    CONTENTS,
    DTYPE,
    KEYS,
    LAYOUT,
    SideChannels,
    check_contents,
    contents_of,
    stated_blocks,
    with_names,
    with_stated_words,
)
from kvpatch.worker.envelope import TABLES, WORDS, message_on, write_message

from .release_workers import worker_of

_RELEASE = "0.33.0"


@dataclass
class Stated:
    """As a release's worker states itself."""

    engine_id: str
    blocks: list[int] = field(default_factory=list)


class CircularBufferSpec:
    """As vLLM's, as far as anybody looks."""

    block_size = 13


def _states(*dtypes: torch.dtype) -> Any:
    return SimpleNamespace(shapes=[(2, 3)] * len(dtypes), dtypes=dtypes)


def _worker(*specs: Any, release: str = _RELEASE) -> Any:
    return worker_of(release, _layer_specs={f"layer {n}": spec for n, spec in enumerate(specs)})


_HYBRID = (object(), _states(torch.bfloat16, torch.float32), _states(torch.bfloat16, torch.float32))


_RINGS = (_states(torch.float16), CircularBufferSpec(), CircularBufferSpec())


@pytest.mark.parametrize(
    ("specs", "release", "said"),
    [
        (_HYBRID, _RELEASE, "states of bfloat16,float32"),
        (
            (*_HYBRID, *_RINGS),
            _RELEASE,
            "states of bfloat16,float32; states of float16; a ring of 13",
        ),
        ((object(), object()), _RELEASE, None),  # of rows of tokens there is nothing to say
        (_HYBRID, "0.17.0", None),  # which has no plan of groups
    ],
)
def test_types_and_slots_are_said_of_all_layers_once(
    specs: tuple[Any, ...], release: str, said: str | None
) -> None:
    assert contents_of(_worker(*specs, release=release)) == said


@pytest.mark.parametrize("theirs", [None, "states of float16"])
def test_a_peer_that_says_nothing_or_the_same_is_taken_as_it_is(theirs: str | None) -> None:
    check_contents("states of float16", theirs)


@pytest.mark.parametrize("theirs", ["states of bfloat16", "", 7, ["states of float16"], "x" * 9999])
def test_a_peer_that_says_anything_else_is_refused(theirs: object) -> None:
    with pytest.raises(PeerRefused, match="hold states of float16 here") as found:
        check_contents("states of float16", theirs)
    assert len(str(found.value)) < 1000
    assert "--mamba-ssm-cache-dtype" in str(found.value)


def test_words_are_names_more_which_a_release_lets_go_of() -> None:
    plain, said = Stated("p", [1]), Stated("p", [2])
    message = {WORDS: {KEYS: "tiles", CONTENTS: "states of float16"}, TABLES: {"of another": 5}}
    write_message(said, message)

    found = with_stated_words({0: plain, 1: said})

    assert found[0] is plain
    again = with_stated_words({1: said})[1]
    assert vars(again)[KEYS] == "tiles", "a MultiConnector hands it to several"
    assert message_on(found[1])[TABLES] == {"of another": 5}, "other patches find theirs"
    encoded = msgspec.msgpack.encode(found[1])
    assert msgspec.msgpack.decode(encoded) == {
        "engine_id": "p", "blocks": [2], KEYS: "tiles", CONTENTS: "states of float16",
    }  # fmt: skip
    assert msgspec.msgpack.decode(encoded, type=Stated) == Stated("p", [2])


def test_a_struct_of_an_old_release_takes_names_more() -> None:
    class Struct(msgspec.Struct, omit_defaults=True, dict=True):  # type: ignore[call-arg]
        engine_id: str
        blocks: int = 0

    found = with_names(Struct("p", 3), {BLOCKS: "128/64"})

    encoded = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.decode(encoded) == {"engine_id": "p", "blocks": 3, BLOCKS: "128/64"}
    assert msgspec.msgpack.decode(encoded, type=Struct) == Struct("p", 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, None),
        ({BLOCKS: "128/64"}, StatedBlocks(128, 64)),
        (
            {BLOCKS: "16/16", LAYOUT: "NHD", DTYPE: "float32"},
            StatedBlocks(16, 16, "NHD", "float32"),
        ),
        ({BLOCKS: "16/16", LAYOUT: "BLHNC", DTYPE: 7}, StatedBlocks(16, 16)),
    ],
)
def test_what_a_peer_states_of_its_blocks(words: dict[str, object], expected: object) -> None:
    assert stated_blocks(words) == expected


@pytest.mark.parametrize(
    "blocks", ["", "16", "0/0", "16/32", "48/32", "99999999/1", "-1/1", 16, []]
)
def test_blocks_that_cannot_be_are_refused(blocks: object) -> None:
    with pytest.raises(PeerRefused, match="its kvpatch states blocks of"):
        stated_blocks({BLOCKS: blocks})


def test_a_peer_that_nobody_reaches_is_taken_for_one_without_kvpatch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel_key, "ANSWER_MS", 50)
    channels = SideChannels()
    for host in ("127.0.0.1", "no such host"):
        channels.found["p"] = Address(host, 1)
        caplog.clear()
        assert channels.words("p", 0, FACTS[_RELEASE]) == {}
        assert "is taken for one without" in caplog.text


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_is_written_as_vllm_takes_it(host: str) -> None:
    assert Address(host, 5600).path == "tcp://[::1]:5600"
