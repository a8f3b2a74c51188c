"""A P of another release: which one it may be, how it is asked, and what is refused of it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvpatch import patches
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.patches import unlike_releases
from kvpatch.peer import other_releases
from kvpatch.peer.decision import FLASH_ATTENTION, decide
from kvpatch.peer.other_releases import (
    NULLABLE,
    Address,
    InterpretedSocket,
    PeerReleases,
    Statement,
    question_for,
    question_of,
    read_statement,
    releases_by_answer,
    releases_by_fields,
    speak_alike,
    to_agent,
    to_engine,
    translated,
)
from kvpatch.worker.state import worker_state

from .test_decision import local

HASHED = [name for name in RELEASES if FACTS[name].encodes_metadata]
NEWEST = FACTS["0.33.0"]


def answer(release: str, **more: Any) -> dict[str, Any]:
    """What a P of a release answers, as far as its names go, and which of it is null."""
    nulls = dict.fromkeys(NULLABLE & FACTS[release].answer)
    return {**dict.fromkeys(FACTS[release].answer, 1), **nulls, **more}


#: All that any release answers, null where P did not send it: as a typed proxy passes it on.
EVERY = dict.fromkeys(NEWEST.answer)


def fields(release: str, **changes: Any) -> dict[str, Any]:
    """What a P of a release with FlashAttention states of blocks of 16 tokens, two layers."""
    facts = FACTS[release]
    regions = 4 if facts.cache_shape == "keys first" else 2
    length = 16 * 4 * 8 * 2 * 4 // (regions // 2)
    every = {
        "engine_id": "p",
        "agent_metadata": b"agent",
        "kv_caches_base_addr": [1 << 30 | n << 20 for n in range(regions)],
        "device_id": 0,
        "num_blocks": 6,
        "block_lens": [length] * regions,
        "block_strides": [length] * regions,
        "kv_cache_layout": "LBHNC" if facts.names_layouts else "HND",
        "block_size": 16,
        "ssm_sizes": [0, 0],
        "attn_backend_name": FLASH_ATTENTION,
        "physical_blocks_per_logical_kv_block": 1,
        "dcp_size": 1,
        "pcp_size": 1,
        "region_members": [],
        "packed_member_layouts": {},
    }
    return {name: every.get(name) for name in facts.agent_metadata} | changes


def stated(release: str, **changes: Any) -> Statement:
    found = fields(release, **changes)
    releases = releases_by_fields(releases_by_answer(answer(release)), found)
    return Statement(releases, found)


# -- which release ------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_among_those_that_answer_so(release: str) -> None:
    found = releases_by_answer(answer(release, kvpatch_hold="theirs", anything="else"))

    assert release in found
    assert question_of(found) in (FACTS[release].question, "rank")
    questions = {FACTS[name].question for name in found}
    assert len(questions - {"at a port"}) == 1  # whose listeners answer whatever they are asked


@pytest.mark.parametrize("release", HASHED)
def test_an_answer_that_a_proxy_has_cut_tells_no_other_question(release: str) -> None:
    """But for 0.26 and 0.27, whose only field of their own is null: they come as older ones."""
    for name in FACTS[release].answer:
        cut = {field: value for field, value in answer(release).items() if field != name}
        found = releases_by_answer(cut)
        looks_older = name in ("remote_blocks_expiry_time", "remote_num_tokens")
        if looks_older and release in ("0.26.0", "0.27.0", "0.27.1"):
            assert question_of(found) == "rank"
            continue
        assert not found or question_of(found) == FACTS[release].question


@pytest.mark.parametrize("release", RELEASES)
def test_null_for_what_p_did_not_send_makes_it_no_newer(release: str) -> None:
    found = releases_by_answer({**EVERY, **answer(release)})

    assert release in found
    newest = FACTS[found[-1]].answer
    assert newest - NULLABLE == FACTS[release].answer - NULLABLE
    nullable = {"0.21.0", *RELEASES[24:30], "0.26.0", "0.27.0", "0.27.1"}
    assert (question_of(found) is None) == (release in nullable)


def test_what_a_request_says_of_its_p_is_learnt_and_forgotten() -> None:
    known = PeerReleases()
    for params in (None, {}, {"do_remote_prefill": True}, [1], "text"):
        known.learn(params)
    known.learn(answer("0.25.0", do_remote_prefill=True, remote_engine_id=["p"]))
    known.learn(answer("0.25.0", do_remote_prefill=True, remote_engine_id="x" * 2000))
    known.learn(answer("0.25.0", do_remote_prefill=True, remote_engine_id="p"))

    told = PeerReleases()
    told.take(known.of(["p", "q"]))

    assert told.of(["p", "q"]) == {"p": ("0.21.0", *RELEASES[24:30])}
    known.learn({"do_remote_prefill": True, "remote_engine_id": "p"})  # a proxy has cut it
    assert known.of(["p"]) == {}


def test_neighbours_that_say_the_same_are_left_to_the_release() -> None:
    assert speak_alike(("0.31.0", "0.32.0"), NEWEST)
    assert speak_alike(("0.29.0",), NEWEST)  # what it does not state has a default
    for release in ("0.28.0", "0.25.1", "0.17.1"):
        assert not speak_alike((release,), NEWEST)
    assert not speak_alike(("0.22.1", "0.23.0"), FACTS["0.22.1"])  # one of them begins otherwise


# -- asking ---------------------------------------------------------------------------------------


@dataclass
class Listener:
    """A stock P's; the lab plays those of the releases, which end by a question of another form."""

    release: str
    metadata: bytes
    peer_hash: str = "theirs"
    asked: list[list[Any]] = field(default_factory=list)

    def ask(self, address: Address, message: bytes) -> list[bytes]:
        self.asked.append(msgspec.msgpack.decode(message))
        payload = {"compatibility_hash": self.peer_hash, "agent_metadata_bytes": self.metadata}
        clock = [msgspec.msgpack.encode(1.5)] if len(self.asked[-1]) == 3 else []
        return [msgspec.msgpack.encode(payload), *clock]


def asked_by(own: str, listener: Listener, told: dict[int, Any] | None = None) -> list[bytes]:
    """What a D of a release is answered, as its own handshake asks it."""
    socket = InterpretedSocket(
        Address("127.0.0.1", 1),
        releases_by_answer(answer(listener.release)),
        FACTS[own],
        "ours",
        FLASH_ATTENTION,
        ({} if told is None else told).__setitem__,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other_releases, "ask", listener.ask)
        socket.send(question_for(FACTS[own].question, 0))
    assert socket.recv() == socket.recv_multipart()[0]
    return socket.recv_multipart()


@pytest.mark.parametrize("own", ["0.13.0", "0.17.1", "0.20.2", "0.25.1", "0.26.0", "0.33.0"])
@pytest.mark.parametrize("theirs", ["0.13.0", "0.18.1", "0.22.1", "0.25.0", "0.28.0", "0.33.0"])
def test_p_is_asked_in_its_own_words_and_understood_in_ours(own: str, theirs: str) -> None:
    told: dict[int, Any] = {}
    listener = Listener(theirs, msgspec.msgpack.encode(fields(theirs)))

    frames = asked_by(own, listener, told)

    wanted = 3 if FACTS[theirs].question == "stage and rank" else 2
    assert [len(asked) for asked in listener.asked] == [wanted]
    assert len(frames) == (2 if FACTS[own].question == "stage and rank" else 1)
    payload = msgspec.msgpack.decode(frames[0])
    assert payload["compatibility_hash"] == "theirs"
    metadata = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    if told[0] is None:  # left to the release, which has a default for what is not there
        assert metadata == fields(theirs)
        return
    optional = {"region_num_blocks", "region_group_ids", "region_names", "region_mem_types"}
    optional |= {"region_members", "packed_member_layouts", "ple_block_len"}
    assert FACTS[own].agent_metadata - metadata.keys() <= optional
    assert metadata.keys() <= FACTS[own].agent_metadata
    assert metadata["kv_cache_layout"] == ("LBHNC" if FACTS[own].names_layouts else "HND")
    assert told[0].fields == fields(theirs)


def test_one_that_states_our_hash_is_left_as_it_is() -> None:
    told: dict[int, Any] = {0: "something"}
    metadata = msgspec.msgpack.encode(fields("0.33.0", attn_backend_name="ANY"))
    payload, _ = asked_by("0.33.0", Listener("0.33.0", metadata, "ours"), told)

    assert msgspec.msgpack.decode(payload)["agent_metadata_bytes"] == metadata
    assert told == {0: None}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (pickle.dumps(fields("0.25.1")), "is no metadata"),
        (msgspec.msgpack.encode([1, 2]), "is no metadata"),
        (msgspec.msgpack.encode(fields("0.20.0")), "as no vLLM that kvpatch knows"),
        (msgspec.msgpack.encode(fields("0.25.1") | {"more": 1}), "as no vLLM that kvpatch knows"),
        (b"", "is no metadata"),
    ],
)
def test_what_no_release_states_is_refused(metadata: bytes, message: str) -> None:
    with pytest.raises(PeerRefused, match=message):
        asked_by("0.33.0", Listener("0.25.1", metadata))


# -- what is read, and what is not ------------------------------------------------------------


_THREE_REGIONS = {"kv_caches_base_addr": [1 << 30] * 3, "block_lens": [4096] * 3}
_TWO_GROUPS = {"groups": (frozenset("a"), frozenset("b"))}


@pytest.mark.parametrize(
    ("release", "changes", "ours", "ranks", "message"),
    [
        ("0.25.1", {"attn_backend_name": "FLASHINFER"}, {}, 1, "its attention backend is FLASHIN"),
        ("0.25.1", {"kv_cache_layout": "BLHNC"}, {}, 1, "its layout is BLHNC"),
        ("0.25.1", _THREE_REGIONS, {}, 1, "its 3 regions of 2"),
        ("0.25.1", {"block_lens": [2048, 2048]}, {}, 1, "come to"),
        ("0.19.1", {}, {}, 1, "not stated"),  # which states no backend
        ("0.25.1", {}, {"is_plain": False}, 1, "full attention"),
        ("0.25.1", {}, _TWO_GROUPS, 1, "full attention"),
        ("0.25.1", {}, {}, 2, "tensor-parallel ranks"),
    ],
)
def test_what_cannot_be_told_is_refused(
    release: str, changes: dict[str, Any], ours: dict[str, Any], ranks: int, message: str
) -> None:
    peer = read_statement(stated(release, **changes), NEWEST, 0, ranks)

    found = decide(local(backend=FLASH_ATTENTION, **ours), peer, NEWEST)

    assert isinstance(found, PeerRefused), found
    assert message in found.reason


def test_the_words_for_it_are_no_part_of_the_decision() -> None:
    """D's release is told of whole blocks where 0.20 does not say so; we do not believe it."""
    said = translated(stated("0.20.2", attn_backend_name="FLASHINFER"), NEWEST, FLASH_ATTENTION)
    assert said["physical_blocks_per_logical_kv_block"] == 1

    read = read_statement(stated("0.20.2", attn_backend_name="FLASHINFER"), NEWEST, 0, 1)
    assert read.kernel_blocks_per_block is None


# -- what p is told, and how long it waits ------------------------------------------------------


def worker_with(statement: Statement | None) -> Any:
    worker = SimpleNamespace(_remote_agents={"p": {0: "agent of p"}, "q": {0: "agent of q"}})
    worker_state(worker).of(PeerReleases).state("p", 0, statement)
    return worker


def test_p_is_told_in_its_own_count_and_sent_no_heartbeats_where_it_knows_none() -> None:
    worker = worker_with(stated("0.20.2"))

    assert to_engine(worker, "p", b"a:b:c:8") == b"a:b:c:1"
    assert to_agent(worker, "agent of p", b"HB:a,b") is None
    assert to_agent(worker, "agent of q", b"HB:a,b") == b"HB:a,b"
    assert to_engine(worker, "q", b"a:8") == b"a:8"
    assert to_engine(worker, "p", b"") == b""
    assert to_engine(worker_with(stated("0.25.1")), "p", b"HB:a") == b"HB:a"
    assert to_agent(worker_with(None), "agent of p", b"HB:a,b") == b"HB:a,b"
    worker_state(worker).of(PeerReleases).state("p", 0, None)  # it comes back as one of ours
    assert to_engine(worker, "p", b"a:8") == b"a:8"


def test_what_stands_for_the_socket_is_outside_the_side_channels_key() -> None:
    """The key's wrapper makes a socket of its own, whatever it wraps."""
    assert patches.SLUGS.index("side_channel_key") < patches.SLUGS.index("unlike_releases")


#: What the release's own handshake asked last.
sockets: list[Any] = []


class TestWhereNoOtherReleaseIsAccepted:
    """The release's own handshake, by the fields of P's answer."""

    @staticmethod
    def shake_hands(
        of_d: str, params: Mapping[str, Any], monkeypatch: Any, *, accepts: bool = False
    ) -> list[Any]:
        """What D's own handshake was called with."""
        monkeypatch.setenv("KVPATCH_ACCEPT", "vllm_version" if accepts else "")
        worker = SimpleNamespace(enforce_compat_hash=True, compat_hash="", backend_name="")
        state = worker_state(worker)
        state.facts = FACTS[of_d]
        told = PeerReleases()
        told.learn({**params, "do_remote_prefill": True, "remote_engine_id": "p"})
        state.of(PeerReleases).take(told.of(["p"]))
        called: list[Any] = []
        sockets.clear()

        def own(*args: Any, **named: Any) -> None:
            called.append((args, named))
            with unlike_releases._zmq_ctx(lambda *_: nullcontext("zmq's own"), None, 3, "") as one:
                sockets.append(one)

        named = {"expected_engine_id": "p", "remote_tp_size": 2, "more": 3}
        unlike_releases._nixl_handshake(own, worker, "host", 1, **named)
        return called

    @pytest.mark.parametrize(
        ("of_d", "of_p"),
        [
            # A proxy that leaves fields out makes a P like D look older.
            *(("0.33.0", older) for older in ("0.33.0", "0.32.0", "0.25.1", "0.20.2", "0.13.0")),
            ("0.33.0", "0.12.0"),
            ("0.25.1", "0.26.0"),  # newer by a null alone, which may be the proxy's
            ("0.31.0", "0.33.0"),  # newer, and asked alike
        ],
    )
    def test_an_answer_with_less_than_ours_or_asked_alike_is_stocks(self, of_d, of_p, monkeypatch):
        called = self.shake_hands(of_d, answer(of_p), monkeypatch)

        assert called == [(("host", 1, 2, "p"), {"more": 3})]

    @pytest.mark.parametrize(
        ("of_d", "of_p"), [("0.25.1", "0.28.0"), ("0.25.1", "0.33.0"), ("0.12.0", "0.13.0")]
    )
    def test_a_newer_p_that_the_question_would_end_is_refused(self, of_d, of_p, monkeypatch):
        with pytest.raises(PeerRefused, match=f"P runs vLLM {of_p}"):
            self.shake_hands(of_d, answer(of_p), monkeypatch)

    @pytest.mark.parametrize("release", HASHED)
    @pytest.mark.parametrize("accepts", [True, False])
    def test_its_own_releases_p_behind_a_typed_proxy_is_stocks(self, release, accepts, monkeypatch):
        """Asked as the release asks, which an interpreted socket does too."""
        asked: list[InterpretedSocket] = []

        def stands_in(*ends: Any) -> str:
            asked.append(InterpretedSocket(*ends))
            return "stands in"

        monkeypatch.setattr(unlike_releases, "InterpretedSocket", stands_in)
        params = {**EVERY, **answer(release)}
        (found,) = self.shake_hands(release, params, monkeypatch, accepts=accepts)

        assert found[0] == ("host", 1, 2, "p")
        assert sockets == ["stands in" if asked else "zmq's own"]
        assert all(question_of(one.releases) == FACTS[release].question for one in asked)

    @pytest.mark.parametrize("release", RELEASES)
    @pytest.mark.parametrize("typed", ["0.21.0", "0.26.0", "0.28.0", "0.29.0", "0.33.0"])
    def test_nor_does_a_proxy_make_it_newer_whose_types_have_zeroes(
        self, release, typed, monkeypatch
    ):
        """As protobuf's have them, for fields that P did not send; and for null."""
        zeroes = dict.fromkeys(FACTS[typed].answer, 0)
        zeroes |= {"remote_request_id": "", "transfer_mode": "", "remote_blocks_expiry_time": 0.0}
        zeroes = {name: zeroes[name] for name in FACTS[typed].answer}
        own = {name: value for name, value in answer(release).items() if value is not None}
        assert self.shake_hands(release, {**zeroes, **own}, monkeypatch)
