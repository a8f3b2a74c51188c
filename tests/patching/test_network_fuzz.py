"""Random messages of all that crosses a network: each is taken or refused, and nothing grows.

What is changed here are recorded messages: those of each release's handshake, of kvpatch's own
texts in P's answers, of notifications. The lab plays the parameters at real schedulers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvpatch.checks.grants import read_hold, read_promise
from kvpatch.core.errors import NoDigest, ParamsRefused, PeerRefused, ReadRefused
from kvpatch.core.installed import installed_facts
from kvpatch.core.releases import FACTS, GENERATIONS
from kvpatch.guard.transfer_params import RequestLimits, checked
from kvpatch.load.prompt_hashes import FIELD, read_prompt
from kvpatch.peer import other_releases, statement
from kvpatch.peer.decision import FLASH_ATTENTION
from kvpatch.peer.other_releases import (
    Address,
    InterpretedSocket,
    Notifications,
    question_for,
    read_statement,
)
from kvpatch.peer.statement import SideChannels, stated_blocks

from .test_transfer_params import _OWN
from .test_unlike_releases import HASHED, fields

HOST = "127.0.0.1"

_fuzzed = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    suppress_health_check=list(HealthCheck),
)
_DEEP = b"\x81\xa1a" + b"\x91" * 100_000
#: msgpack's own types, from what a peer may send.
_VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats()),
        *(st.text(max_size=9), st.binary(max_size=9)),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@st.composite
def _edited(draw: Callable[..., Any], recorded: list[bytes]) -> bytes:
    """A recorded message with bytes that are others, more, or gone."""
    found = bytearray(draw(st.sampled_from(recorded)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(found)))
        found[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(found)


def _payload(metadata: bytes, **more: Any) -> bytes:
    return msgspec.msgpack.encode(
        {"compatibility_hash": "theirs", "agent_metadata_bytes": metadata, **more}
    )


_STATED = {release: msgspec.msgpack.encode(fields(release)) for release in HASHED[::4]}
_ANSWERS = [_payload(metadata) for metadata in _STATED.values()]


@st.composite
def _payloads(draw: Callable[..., Any]) -> bytes:
    """An answer of P's with other bytes, or with other values in its fields."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=64) | _edited(_ANSWERS))
    stated = fields(draw(st.sampled_from(sorted(_STATED))))
    changes = draw(st.dictionaries(st.sampled_from(sorted(stated)), _VALUES, max_size=3))
    return _payload(msgspec.msgpack.encode(stated | changes), **draw(_WORDS))


_WORDS = st.dictionaries(
    st.sampled_from(["kvpatch_keys", "kvpatch_contents", "kvpatch_blocks", "kvpatch_layout"]),
    _VALUES | st.sampled_from(["64/16", "0/0", "16/64", "columns", "HND"]),
    max_size=3,
)


@_fuzzed
@example(answer=_DEEP, own="0.33.0")
@example(answer=_payload(_DEEP), own="0.33.0")
@example(answer=b"\x81\xa1\xff\x01", own="0.33.0")
@given(answer=_payloads(), own=st.sampled_from(["0.20.2", "0.33.0"]))
def test_what_p_answers_at_a_handshake(answer: bytes, own: str) -> None:
    told: dict[int, Any] = {}
    socket = InterpretedSocket(
        Address(HOST, 1),
        tuple(HASHED),
        FACTS[own],
        "ours",
        FLASH_ATTENTION,
        told.__setitem__,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other_releases, "ask", lambda *asked: [answer])
        patch.setattr(other_releases, "question_of", lambda releases: "rank")
        patch.setattr(statement, "ask", lambda *asked: [answer])
        with suppress(PeerRefused):
            socket.send(question_for(FACTS[own].question, 0))
            assert sum(map(len, socket.recv_multipart())) <= 2 * len(answer) + 4096
            if told.get(0) is not None:
                read_statement(told[0], FACTS[own], 0, 1)
        channels = SideChannels()
        channels.found["p"] = Address(HOST, 1)
        with suppress(PeerRefused):
            stated_blocks(channels.words("p", 0, FACTS["0.20.2"]))


_TEXTS = [b"1/0123456789abcdef/1a2b,3c4d", b"1/1a2b,3c4d", b"1/c0/c0/AAAA", b"2/anything"]


@_fuzzed
@given(_edited(_TEXTS).map(lambda text: text.decode("latin-1")) | st.text(max_size=40))
def test_kvpatchs_own_texts_in_ps_answer(text: str) -> None:
    for read, refusal in ((read_hold, ReadRefused), (read_promise, NoDigest)):
        with suppress(refusal):
            read(text)
    read_prompt({FIELD: text})


@_fuzzed
@given(
    st.dictionaries(st.sampled_from(sorted(_OWN)) | st.text(max_size=5), _VALUES, max_size=4),
    st.sampled_from([FACTS[releases[-1]] for releases in GENERATIONS.values()]),
)
def test_parameters_of_a_client(changes: dict[str, Any], facts: Any) -> None:
    sent = _OWN | changes
    limits = RequestLimits(max_model_len=1024)
    try:
        found = checked(sent, facts, limits)
    except ParamsRefused as error:
        assert len(str(error)) < 2000 and str(error).isprintable()
        return
    assert found is not None
    assert len(repr(found)) <= 2 * len(repr(sent)) + 100
    assert repr(checked(found, facts, limits)) == repr(found), "what is taken is taken again"


_READS = [b"known:1", b"unknown:2", b"HB:known,other", b"PUSH_REG:\x80"]


@_fuzzed
@example([b"no number", b"known:", b"known:x", b"known:0", b"\xff:1"])
@given(st.lists(_edited(_READS) | st.binary(max_size=20), max_size=6))
def test_what_peers_notify_an_engine_of(messages: list[bytes]) -> None:
    """The installed release's own books take what is left, and grow by no name of a peer's."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )

    counts: dict[str, int] = defaultdict(int)
    worker = SimpleNamespace(
        transfer_topo=object(),
        world_size=1,
        _reqs_to_send={"known": 1.0},
        _reqs_to_process={"known"},
        consumer_notification_counts_by_req=counts,
        expected_consumer_notifications_by_req={},
        xfer_stats=SimpleNamespace(record_notification_after_expiry=lambda: None),
        _handle_heartbeat=lambda text: None,
    )
    understood = Notifications(worker, installed_facts()).understood({"d": messages})
    left = [m for m in understood.get("d", ()) if not m.startswith(b"PUSH_REG:")]
    worker.nixl_wrapper = SimpleNamespace(get_new_notifs=lambda: {"d": left})

    assert NixlPullConnectorWorker._get_new_notifs(worker) <= {"known"}

    assert {*counts} <= {"known"}
    assert all(message in understood["d"] for message in messages if message in _READS)
