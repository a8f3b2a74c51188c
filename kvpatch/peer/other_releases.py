"""A P of another release: which it may be, how it is asked, and what it states, in our words.

The names of the fields that P answers a request with, and of those that it states at a handshake,
tell which releases it may be of.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import PeerRefused
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import FACTS, Question, ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER, inner_layout, layer_by_layer
from kvpatch.transfer.lease import HEARTBEAT
from kvpatch.worker.state import held_by

if TYPE_CHECKING:
    from kvpatch.peer.agent_metadata import AgentMetadata

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: Those that all releases answer, and that may be false or empty.
_FLAGS = frozenset(("do_remote_prefill", "do_remote_decode", "remote_block_ids"))
#: Of all answers, those fields that some release has.
_FIELDS = frozenset[str]().union(*(facts.answer for facts in FACTS.values()))
#: What a P's words must mean the same in, to be taken for our own release's.
_MEANINGS = ("question", "reader_count", "cache_shape", "names_layouts", "has_cache_groups")
#: The only field that a P which has it may answer null for.
NULLABLE = frozenset(("remote_blocks_expiry_time",))
#: The only one that a P which has it answers 0 for.
_ZERO = "remote_registration_generation"
_MOST_ID = 1024

Releases = tuple[str, ...]


def releases_by_answer(params: Mapping[str, Any]) -> Releases:
    """Returns the releases whose P answers with just these fields; none if a proxy left some out.

    A proxy with types of its own adds null for fields that P did not send.
    """
    named = _FIELDS & params.keys()
    stated = {n for n in named if params[n] or (n == _ZERO and params[n] is not None)}
    stated |= named & _FLAGS
    fit = {n: f.answer for n, f in FACTS.items() if f.answer - NULLABLE <= stated <= f.answer}
    return tuple(name for name in fit if fit[name] == named) or tuple(fit)


def releases_by_fields(releases: Releases, stated: Iterable[str]) -> Releases:
    """Returns those of `releases` whose workers state just these fields at a handshake."""
    fields = frozenset(stated)
    return tuple(name for name in releases if FACTS[name].agent_metadata == fields)


def question_of(releases: Releases) -> Question | None:
    """Returns what releases that answer alike want to be asked; None where they do not agree.

    A listener <= 0.11.0 answers whatever it is asked.
    """
    found = {FACTS[name].question for name in releases} - {"at a port"}
    return found.pop() if len(found) == 1 else None


def speak_alike(releases: Releases, own: ReleaseFacts) -> bool:
    """True if all these releases say what ours says, and mean the same by it."""
    return all(
        own.agent_metadata - _OPTIONAL <= FACTS[name].agent_metadata
        and all(getattr(FACTS[name], fact) == getattr(own, fact) for fact in _MEANINGS)
        for name in releases
    )


#: What releases that have them do without, where a P does not state them.
_OPTIONAL = frozenset(
    ("dcp_size", "pcp_size", "region_num_blocks", "region_group_ids", "region_names")
) | {"region_mem_types", "region_members", "packed_member_layouts", "ple_block_len"}


@dataclass(frozen=True)
class Statement:
    """The metadata that a rank of a P of another release has stated, in the form of that release.

    Attributes:
        releases: the releases that it may be of.
        fields: the fields of its metadata, by name.
    """

    releases: Releases
    fields: Mapping[str, Any]

    @property
    def facts(self) -> ReleaseFacts:
        """Returns the facts of one of these releases, whose metadata has the same fields."""
        return FACTS[self.releases[-1]]


@dataclass(eq=False)
class PeerReleases:
    """The releases of peers, as far as a scheduler or a worker knows them, by engine id."""

    _answers: RecentEngines[Releases] = field(default_factory=RecentEngines)
    _stated: RecentEngines[dict[int, Statement]] = field(default_factory=RecentEngines)

    def learn(self, params: Any) -> None:
        """Books what a request says of the P that it was sent by."""
        if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
            return
        engine_id = params.get("remote_engine_id")
        if isinstance(engine_id, str) and 0 < len(engine_id) <= _MOST_ID:
            self._answers[engine_id] = releases_by_answer(params)

    def of(self, engine_ids: Iterable[str]) -> dict[str, Releases]:
        """Returns the releases of those engines that something is known of, by engine."""
        found = ((engine_id, self._answers.get(engine_id)) for engine_id in engine_ids)
        return {engine_id: releases for engine_id, releases in found if releases}

    def take(self, told: Mapping[str, Releases]) -> None:
        """Books what the scheduler knows."""
        for engine_id, releases in told.items():
            self._answers[engine_id] = releases

    def state(self, engine_id: str, rank: int, statement: Statement | None) -> None:
        """Books what a rank has stated; None for one that speaks as we do."""
        ranks = dict(self._stated.get(engine_id, {}))
        ranks.pop(rank, None)
        if statement is not None:
            ranks[rank] = statement
        self._stated[engine_id] = ranks

    def stated(self, engine_id: str, rank: int) -> Statement | None:
        """Returns what a rank of another release has stated; None of any other."""
        return self._stated.get(engine_id, {}).get(rank)

    def speaks_otherwise(self, engine_id: str) -> Statement | None:
        """Returns what some rank of a P of another release has stated; None of any other P."""
        return next(iter(self._stated.get(engine_id, {}).values()), None)


_GET = b"get_meta_msg"
_BYTES = "agent_metadata_bytes"


@dataclass(frozen=True)
class Address:
    """The address at which a P listens."""

    host: str
    port: int

    @property
    def path(self) -> str:
        is_bare = ":" in self.host and not self.host.startswith("[")  # vLLM takes both
        host = f"[{self.host}]" if is_bare else self.host
        return f"tcp://{host}:{self.port}"


def question_for(question: Question, rank: int) -> bytes:
    """A question for a rank, of a P without a pipeline."""
    import msgspec

    if question == "at a port":
        return _GET
    ranks = (rank,) if question == "rank" else (0, rank)
    return msgspec.msgpack.encode((_GET, *ranks))


def rank_asked_for(question: Question, message: bytes) -> int:
    """Returns the rank that our own release asks for; refuses a later stage of a pipeline."""
    import msgspec

    of_type = tuple[bytes, int] if question == "rank" else tuple[bytes, int, int]
    _, *stage, rank = msgspec.msgpack.decode(message, type=of_type)
    if any(stage):
        raise PeerRefused(
            "a P of another release is asked for a later stage of its pipeline",
            "use --pipeline-parallel-size 1 on the prefill side",
        )
    return int(rank)


def ask(address: Address, message: bytes) -> list[bytes]:
    """Returns the frames of what P answers; refuses a P that does not, or has another key."""
    import zmq

    from kvpatch.peer import side_channel_key

    with side_channel_key.side_channel_socket(zmq.REQ, address.path) as asking:
        asking.send(message)
        if not asking.poll(side_channel_key.ANSWER_MS):
            raise side_channel_key.nobody_answers(address.path)
        found: list[bytes] = asking.recv_multipart()
        return found


def fields_of(payload: bytes) -> dict[str, Any]:
    """Returns what P answers or states, by name: msgpack's own types, and nothing else."""
    import msgspec

    try:
        return msgspec.msgpack.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerRefused(
            f"what a P states is no metadata: {shown(str(error))}",
            "use one vLLM and one kvpatch on both sides, and have the proxy pass on P's "
            "remote_host and remote_port",
        ) from error


def translated(statement: Statement, own: ReleaseFacts, backend: str) -> dict[str, Any]:
    """Returns the fields that a worker of our release would state of the same memory.

    What P does not say is what our release takes for nothing said, or our own side's. P's own words
    decide what becomes of the peer.
    """
    stated = statement.fields
    found = {name: stated[name] for name in own.agent_metadata & stated.keys()}
    without = {
        "block_strides": stated["block_lens"],
        "attn_backend_name": backend,
        "ssm_sizes": (0, 0),
        "physical_blocks_per_logical_kv_block": 1,
        "dcp_size": 1,
        "pcp_size": 1,
    }
    found |= {n: v for n, v in without.items() if n in own.agent_metadata and n not in found}
    found["kv_cache_layout"] = layout_as(stated.get("kv_cache_layout"), own)
    return found


def layout_as(layout: Any, own: ReleaseFacts) -> Any:
    """A layout by the name that our release has for it; its own where there is none."""
    inner = inner_layout(layout) if isinstance(layout, str) else None
    if inner is None or layout not in LAYER_BY_LAYER:
        return layout
    return layer_by_layer(inner, like="LBHNC" if own.names_layouts else "HND")


def read_statement(
    statement: Statement, own: ReleaseFacts, tp_rank: int, tp_size: int
) -> AgentMetadata:
    """Reads what a rank of another release states, in our vocabulary."""
    from kvpatch.peer.agent_metadata import read_agent_metadata  # a scheduler needs none of it

    stated = SimpleNamespace(**statement.fields)
    peer = read_agent_metadata(stated, statement.facts, tp_rank, tp_size)
    return replace(peer, layout=layout_as(peer.layout, own), releases=statement.releases)


# --- a handshake with it --------------------------------------------------------------


@dataclass(eq=False)
class InterpretedSocket:
    """Stands for the socket at which our release asks P, and asks P in P's own words.

    What P answers, the release is told in ours. Its checks and its books stay its own.

    Attributes:
        own_hash: what P states too, where it is of our release and configured alike.
        tell: what becomes of what a rank has stated; None for one that speaks as we do.
    """

    peer: Address
    releases: Releases
    own: ReleaseFacts
    own_hash: str
    backend: str
    tell: Callable[[int, Statement | None], None]
    _frames: list[bytes] = field(default_factory=list, init=False)

    def setsockopt(self, *_: int) -> None:
        """Sets nothing: P is asked in a time of kvpatch's own."""

    def send(self, message: bytes) -> None:
        """Asks P what the release asks, and keeps the answer.

        Raises:
            PeerRefused: P does not answer, or as no release that is known.
        """
        import msgspec

        rank = rank_asked_for(self.own.question, message)
        question = question_of(self.releases)
        if question is None:
            raise PeerRefused("nobody knows how to ask this P", "use one vLLM on both sides")
        asked = time.perf_counter()
        payload, *clock = ask(self.peer, question_for(question, rank))
        payload = self._payload(rank, fields_of(payload), payload)
        if self.own.question != "stage and rank":
            self._frames = [payload]
            return
        # The middle of a question's way, for the clock of a P that does not tell its own.
        between = msgspec.msgpack.encode((asked + time.perf_counter()) / 2)
        self._frames = [payload, clock[0] if clock else between]

    def recv(self) -> bytes:
        """Returns what the release is answered."""
        return self._frames[0]

    def recv_multipart(self) -> list[bytes]:
        """Returns that with P's clock behind it, from 0.26 on."""
        return self._frames

    def _payload(self, rank: int, stated: dict[str, Any], payload: bytes) -> bytes:
        import msgspec

        peer_hash, metadata = (stated.get(n) for n in ("compatibility_hash", _BYTES))
        if not isinstance(peer_hash, str) or not isinstance(metadata, bytes):
            raise PeerRefused(
                "P states no compatibility hash, by which its model would be known",
                "use vLLM 0.13 or later on both sides",
            )
        fields = fields_of(metadata)
        releases = releases_by_fields(self.releases, fields)
        if not releases:
            raise PeerRefused(
                f"P states {shown(sorted(fields))}, as no vLLM that kvpatch knows and that answers "
                "requests as it does",
                "use one vLLM on both sides",
            )
        if self.own_hash == peer_hash or speak_alike(releases, self.own):
            self.tell(rank, None)
            return payload
        statement = Statement(releases, fields)
        self.tell(rank, statement)
        ours = translated(statement, self.own, self.backend)
        return msgspec.msgpack.encode(
            {"compatibility_hash": peer_hash, _BYTES: msgspec.msgpack.encode(ours)}
        )


# --- notifications --------------------------------------------------------------------


def to_engine(worker: Any, engine_id: str, message: bytes) -> bytes | None:
    """Returns a message in the words of a peer; None for one that it would not understand.

    With as many ranks on both sides one of ours reads one of P's, which every release takes for
    all that it waits for.
    """
    known = held_by(worker, PeerReleases)
    statement = None if known is None else known.speaks_otherwise(engine_id)
    if statement is None:
        return message
    if message.startswith(HEARTBEAT):
        grants = any(FACTS[name].grants_leases for name in statement.releases)
        return message if grants else None
    request, colon, _ = message.rpartition(b":")
    return request + colon + b"1" if colon else message


def to_agent(worker: Any, agent: str, message: bytes) -> bytes | None:
    """Does the same where NIXL's name of the rank alone is known."""
    if held_by(worker, PeerReleases) is None:
        return message
    for engine_id, ranks in tuple(worker._remote_agents.items()):  # handshakes add to it
        if agent in ranks.values():
            return to_engine(worker, engine_id, message)
    return message


_READ = re.compile(r"(.+):([1-9][0-9]{0,5})", re.DOTALL)
#: A peer's registration in push mode, which the release reads by itself.
_REGISTRATION = b"PUSH_REG:"


class Notifications:
    """Takes out of a worker's notifications what would end its engine.

    A peer says that it has read a request (``NAME:NUMBER``), or that it still wants some (``HB:``).
    The release takes each notification for one of these, and raises where it is none.
    """

    def __init__(self, worker: Any, facts: ReleaseFacts) -> None:
        self._worker, self._facts = worker, facts
        self._dropped = 0

    def understood(self, found: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """Returns what the release can take, by sender."""
        kept = {sender: [*filter(self._is_understood, sent)] for sender, sent in found.items()}
        return {sender: messages for sender, messages in kept.items() if messages}

    def _is_understood(self, message: bytes) -> bool:
        is_understood = message.startswith(_REGISTRATION) or self._can_be_taken(message)
        if not is_understood:
            self._dropped += 1
            if not self._dropped & (self._dropped - 1):  # a peer cannot fill the log
                _LOG.warning(
                    "a peer notifies this engine of %s, which says nothing to it (%d such so far)",
                    *(shown(message), self._dropped),
                )
        return is_understood

    def _can_be_taken(self, message: bytes) -> bool:
        try:
            text = message.decode()
        except UnicodeDecodeError:
            return False
        if self._facts.grants_leases and message.startswith(HEARTBEAT):
            return True
        read = _READ.fullmatch(text)
        if read is None:
            return False
        if self._facts.reader_count == "ranks":
            least, most = sorted((int(read[2]), int(self._worker.world_size)))
            return most % least == 0
        return self._facts.forgives_unknown_reads or read[1] in self._worker._reqs_to_send
