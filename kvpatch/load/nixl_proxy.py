"""A worker's NIXL agent, as the release sees it."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from kvpatch.core.errors import KvpatchError, ReadRefused, UnexpectedRead
from kvpatch.core.proxies import AgentProxy
from kvpatch.load.reader import Loads, Reader, RequestContext
from kvpatch.peer.other_releases import to_agent, to_engine
from kvpatch.transfer.checked_transfer import CheckedTransfer
from kvpatch.transfer.lease import HEARTBEAT
from kvpatch.transfer.nixl import mask_of, tell_over
from kvpatch.transfer.own_read import OwnRead
from kvpatch.worker.state import worker_state


def booked_ranks(worker: Any, engine_id: str, handle: Any) -> list[tuple[int, str]]:
    """Returns the ranks behind a handle that the release has booked, and their names to NIXL.

    Of a peer of more ranks <= 0.13, which has one handle, that is all that were met.
    """
    names = {
        place[-1] if isinstance(place, tuple) else place: name  # by pipeline stage too, from 0.27
        for place, name in tuple(worker._remote_agents.get(engine_id, {}).items())
    }
    handles = worker.dst_xfer_side_handles.get(engine_id)
    if isinstance(handles, Mapping):
        ranks = [int(rank) for rank, one in list(handles.items()) if one == handle]
    else:  # <= 0.13 it shakes hands with one
        ranks = list(names) if handles == handle else []
    return [(rank, names[rank]) for rank in ranks if rank in names]


class ReadingAgent(AgentProxy):
    """Checks the release's own transfers, and prepares kvpatch's in place of some.

    Args:
        reader: None where the release alone reads.
    """

    def __init__(self, agent: Any, loads: Loads, reader: Reader | None, worker: Any) -> None:
        super().__init__(agent)
        self._self_loads = loads
        self._self_reader = reader
        self._self_worker = worker

    @property
    def _reads(self) -> Any:
        """The ``HeterogeneousReads`` of this worker; None before the first such peer."""
        reader = self._self_reader
        return None if reader is None else reader.heterogeneous

    def add_remote_agent(self, metadata: bytes, *args: Any, **kwargs: Any) -> Any:
        """Keeps what hides addresses of the peer's rank in P's answers."""
        name = self.__wrapped__.add_remote_agent(metadata, *args, **kwargs)
        self._self_loads.masks[name] = mask_of(metadata)
        return name

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares the read that is wanted, in place of the one that the descriptors name."""
        with self._self_loads.refusals():
            return self._make_prepped_xfer(*args, **kwargs)

    def _make_prepped_xfer(
        self,
        operation: str,
        local_handle: Any,
        local_indices: Any,
        remote_handle: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        loads, reader, worker = self._self_loads, self._self_reader, self._self_worker
        context = loads.context
        if context is not None:
            notif_msg = to_engine(worker, context.engine_id, notif_msg) or b""
            if context.refusal is not None or context.peer is not None:
                return self._read(context, remote_handle, notif_msg)
        for engine_id in () if reader is None else tuple(reader.peers):  # handshakes add to it
            if booked_ranks(worker, engine_id, remote_handle):
                raise ReadRefused(
                    f"engine {engine_id} has another geometry, and a transfer with it was prepared "
                    "as if it had ours",
                    "restart this engine, with kvpatch on or off for all of its life",
                )
        lifetime = None
        if context is not None and operation == "READ":
            ranks = booked_ranks(worker, context.engine_id, remote_handle)
            if len(ranks) == 1:  # else nothing is known of its blocks
                try:
                    lifetime = loads.lifetime_of(*ranks[0])
                except ReadRefused:
                    tell_over(self.__wrapped__, [ranks[0][1]], notif_msg)
                    raise
        handle = self.__wrapped__.make_prepped_xfer(
            operation,
            local_handle,
            local_indices,
            remote_handle,
            remote_indices,
            # Where there are checks P is notified once they have passed.
            notif_msg if lifetime is None or not lifetime.checks else b"",
            *args,
            **kwargs,
        )
        if lifetime is None:
            return handle
        return CheckedTransfer(self.__wrapped__, handle, ranks[0][1], lifetime, notif_msg)

    def _read(self, context: RequestContext, handle: Any, notification: bytes) -> OwnRead:
        """Prepares the read of a request; P is told of one that fails, which nobody will read."""
        reader, made = self._self_reader, self._reads
        ranks = booked_ranks(self._self_worker, context.engine_id, handle)
        try:
            if context.refusal is not None:
                raise context.refusal
            if not ranks or made is None:
                raise UnexpectedRead(
                    f"a transfer was prepared with none of the ranks of engine {context.engine_id}"
                )
            numbers = [number for number, _ in ranks]
            read: OwnRead = made.prepare(self, context, numbers, notification)
            return read
        except KvpatchError:
            if reader is None or context.engine_id in reader.peers or context.is_of_smaller:
                tell_over(self.__wrapped__, [agent for _, agent in ranks], notification)
            raise

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, *args: Any, **kw: Any) -> Any:
        """Sends a message to a rank, and to those beside it of which the release does not know."""
        told = to_agent(self._self_worker, remote_agent_name, notif_msg)
        if told is None:
            return None
        notif_msg = told
        if worker_state(self._self_worker).facts.meets_one_rank:  # <= 0.13, of a peer of more ranks
            for names in tuple(self._self_worker._remote_agents.values()):  # handshakes add to it
                if remote_agent_name in names.values():
                    others = [name for name in names.values() if name != remote_agent_name]
                    tell_over(self.__wrapped__, others, notif_msg)
        now = monotonic()
        found = self.__wrapped__.send_notif(remote_agent_name, notif_msg, *args, **kw)
        if notif_msg.startswith(HEARTBEAT):
            self._self_loads.leases.beat(remote_agent_name, now)
        return found

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> Any:
        """Returns NIXL's notifications, without those that would end the release's engine."""
        found = self.__wrapped__.get_new_notifs(*args, **kwargs)
        return self._self_loads.understood(found) if found else found

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(handle, OwnRead):
            return handle.start()
        return self.__wrapped__.transfer(handle, *args, **kwargs)

    def check_xfer_state(self, handle: Any) -> Any:
        if isinstance(handle, OwnRead):
            return handle.state()
        return self.__wrapped__.check_xfer_state(handle)

    def get_xfer_telemetry(self, handle: Any) -> Any:
        if isinstance(handle, OwnRead):
            return handle.telemetry()
        return self.__wrapped__.get_xfer_telemetry(handle)

    def stop_reading(self) -> None:
        """Ends the thread of this worker's reads."""
        reads = self._reads
        if reads is not None and reads.thread is not None:
            reads.thread.stop()

    def deregister_memory(self, *args: Any, **kwargs: Any) -> Any:
        """Takes back a registration, as an engine that sleeps or ends: nothing is read meanwhile.

        The next read has the thread start again, and the staging pool made anew (0.33 registers
        anew when it wakes up).
        """
        reads = self._reads
        if reads is not None:
            reads.rest(self.__wrapped__)
        return self.__wrapped__.deregister_memory(*args, **kwargs)

    def release_xfer_handle(self, handle: Any) -> Any:
        if isinstance(handle, OwnRead):
            return handle.release()
        return self.__wrapped__.release_xfer_handle(handle)
