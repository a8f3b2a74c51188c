"""A decode engine reads from a prefill engine of another vLLM release.

Why:
    What D asks at a handshake and what P states have changed in most releases. D of 0.26 or later
    asks P for a stage and a rank, one before for a rank: P's listener ends by the other's
    question, and nobody can shake hands with that P before it is restarted. Where the question
    is the same, the answer has other fields: D cannot decode it, or takes keys and values for
    what they are not, because tensors begin otherwise. A rolling upgrade has such pairs.
Where:
    D's scheduler and worker. P needs nothing.
How:
    P's answer to a request (``kv_transfer_params``) has fields that tell which releases it may be
    of. Where another release's P is accepted (``KVPATCH_ACCEPT=vllm_version``), D asks in the
    words of that release, and tells its own vLLM the answer in its own, which asks no socket but
    kvpatch while hands are shaken. Its metadata is msgpack, by the fields of the table of
    releases; nothing else is ever decoded. From then on the peer is a heterogeneous one: where
    keys and values lie follows from its release, its backend and its regions. P is told of reads
    in its own count, and is sent no heartbeats where it knows none.
Upstream:
    Nothing known; the release is in the hash by which a handshake is refused.
Limits:
    FlashAttention, full attention of one shape, layers apart (HND, NHD), one number of ranks; the
    rest is refused. P <= 0.12 has no hash and no name of its own for a request, and D <= 0.12
    compares none: between those and later ones nothing is loaded. What P <= 0.12 is asked is as in
    stock: 0.11.1 to 0.12 and earlier ones cannot be told apart. A proxy has to pass on all that
    P answered, null too, and no null of its own, where other releases are accepted: one that leaves
    fields out makes P look older than it is, and 0.26 and 0.27 are told from 0.25 by a null alone.
    Where none is accepted, D asks a P that looks older as its own release does, which ends the
    listener of one that is; to D 0.21 to 0.25 a P of 0.26 and 0.27 is such a one.
Remove when:
    Handshakes have a version, and releases answer one another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

from kvpatch.core import seams, settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.ledger import Patch, Site, Step, Wrapped, Wrapper
from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.peer.other_releases import (
    NULLABLE,
    Address,
    InterpretedSocket,
    PeerReleases,
    Releases,
    question_of,
)
from kvpatch.worker.envelope import RELEASES, message_on, read_step, write_step
from kvpatch.worker.state import held_by, nixl_connectors_of, scheduler_state, worker_state


def _add_request(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    for connector in nixl_connectors_of(instance):
        releases = scheduler_state(connector.connector_scheduler).of(PeerReleases)
        releases.learn(request.kv_transfer_params)
    return wrapped(request)


def _write(scheduler: Any, _: Any) -> Callable[[Any], dict[str, Any] | None] | None:
    known = held_by(scheduler, PeerReleases)
    if known is None:  # no step of an engine that has loaded nothing is longer for it
        return None
    waiting = scheduler._reqs_need_recv
    if not waiting:  # as in most steps
        return partial(_releases, known, ())
    params = [request.kv_transfer_params or {} for request, *_ in waiting.values()]
    return partial(_releases, known, [str(one.get("remote_engine_id")) for one in params])


def _releases(known: PeerReleases, asked: Collection[str], metadata: Any) -> dict[str, Any] | None:
    """Returns the releases of the peers that a step's workers ask or greet, for their message."""
    greeted = getattr(metadata, "heartbeat_by_engine", None)
    engines = {*asked, *greeted} if greeted else asked
    found = known.of(engines)
    return {RELEASES: found} if found else None


def _read(worker: Any, message: Mapping[str, Any]) -> None:
    if RELEASES in message:
        worker_state(worker).of(PeerReleases).take(message[RELEASES])


def _start_load_kv(wrapped: Wrapped, instance: Any, metadata: Any) -> Any:
    """Reads the message where a MultiConnector binds it without its base class (<= 0.11.0)."""
    _read(instance, message_on(metadata))
    return wrapped(metadata)


def _nixl_handshake(
    wrapped: Wrapped,
    instance: Any,
    host: str,
    port: int,
    remote_tp_size: int,
    expected_engine_id: str,
    *more: Any,
    **named: Any,
) -> Any:
    state = worker_state(instance)
    known = state.of(PeerReleases)
    whose = remote_tp_size, expected_engine_id
    releases = known.of([expected_engine_id]).get(expected_engine_id)
    if releases is None or not _asks_otherwise(instance, releases, state.facts):
        _check_answers(releases or (), state.facts)
        return wrapped(host, port, *whose, *more, **named)
    socket = InterpretedSocket(
        Address(host, int(port)),
        releases,
        state.facts,
        str(instance.compat_hash),
        str(instance.backend_name),
        partial(known.state, expected_engine_id),
    )
    before = _ASKED.set(socket)
    try:
        return wrapped(host, port, *whose, *more, **named)
    finally:
        _ASKED.reset(before)


#: What the release's handshake of this thread asks in place of a socket.
_ASKED: ContextVar[Any] = ContextVar("kvpatch_asked", default=None)


def _zmq_ctx(wrapped: Wrapped, instance: Any, socket_type: int, addr: str) -> Any:
    asked = _ASKED.get()
    return wrapped(socket_type, addr) if asked is None else nullcontext(asked)


def _asks_otherwise(worker: Any, releases: Releases, own: ReleaseFacts) -> bool:
    """True if P may be asked in the words of its release: others are accepted, and judged.

    A P of several possible questions that may be of our release is asked as our release asks.
    """
    if not own.encodes_metadata or "unlike_engines" in settings.disabled_slugs():
        return False
    if own.release in releases and question_of(releases) is None:
        return False
    return "vllm_version" in settings.accepted_factors() or not worker.enforce_compat_hash


def _check_answers(releases: Releases, own: ReleaseFacts) -> None:
    """Refuses a P whose listener does not take our release's question, or answers in another form.

    An answer with fewer fields than ours may come from an older P, or through a proxy that left
    some out, as stock allows. Such a P gets the question that stock asks. So does one with one more
    field that is null: the proxy may have added it.
    """
    if not releases or FACTS[releases[0]].answer - NULLABLE <= own.answer:
        return
    has_hash = all(FACTS[name].encodes_metadata == own.encodes_metadata for name in releases)
    if has_hash and question_of(releases) == own.question:
        return
    raise PeerRefused(
        f"by the fields of its answer P runs vLLM {releases[0]} to {releases[-1]}, which shakes "
        f"hands in another way than {own.release}",
        "use one vLLM on both sides, and have the proxy pass on what P answered and nothing else",
    )


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    found: dict[Site, Wrapper | Step] = {
        seams.add_request(facts): _add_request,
        seams.build_connector_meta(facts): Step(write_step, _write),
        seams.nixl_handshake(facts): _nixl_handshake,
        seams.side_channel_sockets(facts)[0]: _zmq_ctx,  # the worker's
    }
    if facts.listens_in_scheduler:
        found[seams.bind_connector_metadata(facts)] = Step(read_step, _read)
    else:
        found[seams.start_load_kv(facts)] = _start_load_kv
    return found


PATCH = Patch(slug="unlike_releases", wire_affecting=False, sites=_sites, document=__doc__)
