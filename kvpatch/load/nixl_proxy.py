"""A worker's NIXL agent, as the release sees it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any

from kvpatch.core.errors import KvpatchError, ReadRefused, UnexpectedRead
from kvpatch.core.proxies import AgentProxy
from kvpatch.load.reader import Reader, RequestContext
from kvpatch.load.transfer_handles import (
    agents_beside,
    heterogeneous_engine_of,
    rank_like_us,
    ranks_of,
)
from kvpatch.peer.other_releases import to_agent, to_engine
from kvpatch.transfer.checked_transfer import CheckedTransfer
from kvpatch.transfer.lifetime import HEARTBEAT, Lifetime
from kvpatch.transfer.nixl import mask_of, tell_over
from kvpatch.transfer.own_read import OwnRead


class ReadingAgent(AgentProxy):
    """Prepares the reader's transfers in place of the release's own while the reader reads."""

    def __init__(self, agent: Any, reader: Reader, worker: Any) -> None:
        super().__init__(agent)
        self._self_reader = reader
        self._self_worker = worker

    def add_remote_agent(self, metadata: bytes, *args: Any, **kwargs: Any) -> Any:
        """Keeps what hides addresses of the peer's rank in P's answers."""
        name = self.__wrapped__.add_remote_agent(metadata, *args, **kwargs)
        self._self_reader.masks[name] = mask_of(metadata)
        return name

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares the read that is wanted, in place of the one that the descriptors name."""
        with self._self_reader.refusals():
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
        context = self._self_reader.context
        if context is not None:
            notif_msg = to_engine(self._self_worker, context.engine_id, notif_msg) or b""
            if context.refusal is not None:
                self._let_go(context.engine_id, remote_handle, notif_msg)
                raise context.refusal
            context.check_blocks()
        engine_id = self._self_reader.is_reading()
        if engine_id is not None:
            ranks = ranks_of(self._self_worker, engine_id, remote_handle)
            try:
                return self._prepare(ranks, notif_msg)
            except KvpatchError:
                self._let_go(engine_id, remote_handle, notif_msg)
                raise
        engine = heterogeneous_engine_of(self._self_worker, remote_handle)
        if engine is not None:
            raise ReadRefused(
                f"engine {engine} has another geometry, and a transfer with it was prepared as if "
                "it had ours",
                "restart this engine, with kvpatch on or off for all of its life",
            )
        found = self._rank_like_us(context, operation, remote_handle, notif_msg)
        handle = self.__wrapped__.make_prepped_xfer(
            operation,
            local_handle,
            local_indices,
            remote_handle,
            remote_indices,
            # Where there are checks P is notified once they have passed.
            notif_msg if found is None or not found[1].checks else b"",
            *args,
            **kwargs,
        )
        if found is None:
            return handle
        return CheckedTransfer(self.__wrapped__, handle, *found, notif_msg)

    def _rank_like_us(
        self, context: RequestContext | None, operation: str, handle: Any, notification: bytes
    ) -> tuple[str, Lifetime] | None:
        """Returns NIXL's name of a rank of a peer like us, and what is known of the blocks that it
        holds.

        None where it is not known which rank it is, or nothing of its blocks.
        """
        if context is None or operation != "READ":
            return None
        rank = rank_like_us(self._self_worker, context.engine_id, handle)
        if rank is None:
            return None
        try:
            return rank[1], self._self_reader.lifetime_of(*rank)
        except ReadRefused:
            tell_over(self.__wrapped__, [rank[1]], notification)
            raise

    def _prepare(self, ranks: Sequence[int], notification: bytes) -> Any:
        made, nixl = self._self_reader.heterogeneous, self.__wrapped__
        if made is None:
            raise UnexpectedRead("a read was prepared before any peer had shaken hands")
        if len(ranks) == 1:
            return made.prepare(nixl, ranks[0], notification)
        from kvpatch.transfer.joined_read import JoinedRead  # of few pairs

        needed = made.holding_all(ranks)
        others = [made.agent(rank) for rank in ranks if rank not in needed]
        with ExitStack() as prepared:
            reads = []
            for rank in needed:
                reads.append(made.prepare(nixl, rank, notification))
                prepared.callback(self.release_xfer_handle, reads[-1])
            prepared.pop_all()
        read = JoinedRead(self, reads, lambda: tell_over(self.__wrapped__, others, notification))
        read.owner = self._self_reader.being_read().request
        return read

    def _let_go(self, engine_id: str, remote_handle: Any, notification: bytes) -> None:
        """Tells a peer that a request is over: nobody will ever read its blocks."""
        peer = self._self_reader.peer(engine_id)
        if peer is not None:
            ranks = ranks_of(self._self_worker, engine_id, remote_handle)
            tell_over(self.__wrapped__, [peer.ranks[rank].agent for rank in ranks], notification)

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, *args: Any, **kw: Any) -> Any:
        """Sends a message to a rank, and to those beside it of which the release does not know."""
        told = to_agent(self._self_worker, remote_agent_name, notif_msg)
        if told is None:
            return None
        notif_msg = told
        beside = agents_beside(self._self_worker, remote_agent_name)
        others = [name for name in beside if name != remote_agent_name]
        tell_over(self.__wrapped__, others, notif_msg)
        now = monotonic()
        found = self.__wrapped__.send_notif(remote_agent_name, notif_msg, *args, **kw)
        if notif_msg.startswith(HEARTBEAT):
            self._self_reader.leases.beat(remote_agent_name, now)
        return found

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> Any:
        """Returns NIXL's notifications, without those that would end the release's engine."""
        found = self.__wrapped__.get_new_notifs(*args, **kwargs)
        return self._self_reader.understood(found) if found else found

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Starts a transfer."""
        if isinstance(handle, OwnRead):
            return handle.start()
        return self.__wrapped__.transfer(handle, *args, **kwargs)

    def check_xfer_state(self, handle: Any) -> Any:
        """``DONE``, ``PROC`` or ``ERR``."""
        if isinstance(handle, OwnRead):
            return handle.state()
        return self.__wrapped__.check_xfer_state(handle)

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """NIXL's counts of a transfer."""
        if isinstance(handle, OwnRead):
            return handle.telemetry()
        return self.__wrapped__.get_xfer_telemetry(handle)

    def stop_reading(self) -> None:
        """Ends the thread of this worker's reads."""
        thread = self._self_reader.thread
        if thread is not None:
            thread.stop()

    def deregister_memory(self, *args: Any, **kwargs: Any) -> Any:
        """Takes back a registration, as an engine that sleeps or ends: nothing is read meanwhile.

        The next read has the thread start again (0.33 registers anew when it wakes up).
        """
        thread = self._self_reader.thread
        if thread is not None:
            thread.rest()
        return self.__wrapped__.deregister_memory(*args, **kwargs)

    def release_xfer_handle(self, handle: Any) -> Any:
        """Lets go of a transfer."""
        if isinstance(handle, OwnRead):
            return handle.release()
        return self.__wrapped__.release_xfer_handle(handle)
