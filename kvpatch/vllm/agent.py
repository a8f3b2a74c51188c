"""A worker's NIXL agent, as the release sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import wrapt

from kvpatch._errors import KvpatchError
from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.staged import StagedRead
from kvpatch.vllm.reader import Reader
from kvpatch.vllm.shares import ReadRefused

_LOG = logging.getLogger("kvpatch.unlike_engines")


class ReadingAgent(wrapt.ObjectProxy[Any]):
    """Prepares the reader's transfers in place of the release's own while the reader reads.

    Args:
        rank_of: (engine id, handle) -> the peer's rank whose descriptors it stands for.
        engine_of: handle -> the unlike engine that it belongs to, if it does to one.
    """

    def __init__(
        self,
        agent: Any,
        reader: Reader,
        rank_of: Callable[[str, Any], int],
        engine_of: Callable[[Any], str | None],
    ) -> None:
        super().__init__(agent)
        self._self_reader = reader
        self._self_rank_of = rank_of
        self._self_engine_of = engine_of

    def make_prepped_xfer(
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
        """As NIXL's own; the descriptors that are named are not the ones that are read.

        Raises:
            KvpatchError: the request is refused.
            ReadRefused: a peer that was only shown as one like us would be read as one, or
                blocks to fill are not there.
        """
        if self._self_reader.refusal is not None:
            refused_engine_id, error = self._self_reader.refusal
            self._let_go(refused_engine_id, remote_handle, notif_msg)
            raise error
        self._self_reader.check_blocks()
        engine_id = self._self_reader.is_reading()
        if engine_id is not None:
            rank = self._self_rank_of(engine_id, remote_handle)
            try:
                return self._self_reader.prepare(self.__wrapped__, rank, notif_msg)
            except KvpatchError:
                self._let_go(engine_id, remote_handle, notif_msg)
                raise
        unlike = self._self_engine_of(remote_handle)
        if unlike is not None:
            raise ReadRefused(
                f"engine {unlike} has another geometry, and a transfer with it was prepared as if "
                "it had ours: restart this engine, with kvpatch on or off for all of its life"
            )
        return self.__wrapped__.make_prepped_xfer(
            operation,
            local_handle,
            local_indices,
            remote_handle,
            remote_indices,
            notif_msg,
            *args,
            **kwargs,
        )

    def _let_go(self, engine_id: str, remote_handle: Any, notification: bytes) -> None:
        """Tells a peer that a request is over: nobody will ever read its blocks."""
        peer = self._self_reader.known(engine_id)
        if peer is None:
            return
        rank = peer.ranks[self._self_rank_of(engine_id, remote_handle)]
        try:
            self.__wrapped__.send_notif(rank.agent, notif_msg=notification)
        except errors_of(self.__wrapped__) as error:
            _LOG.warning("%s was not told of a request that is refused: %s", rank.agent, error)

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Starts a transfer."""
        if isinstance(handle, StagedRead):
            return handle.start()
        return self.__wrapped__.transfer(handle, *args, **kwargs)

    def check_xfer_state(self, handle: Any) -> Any:
        """``DONE``, ``PROC`` or ``ERR``."""
        if isinstance(handle, StagedRead):
            return handle.state()
        return self.__wrapped__.check_xfer_state(handle)

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """NIXL's counts of a transfer."""
        if isinstance(handle, StagedRead):
            return handle.telemetry()
        return self.__wrapped__.get_xfer_telemetry(handle)

    def release_xfer_handle(self, handle: Any) -> Any:
        """Lets go of a transfer."""
        if isinstance(handle, StagedRead):
            return handle.release()
        return self.__wrapped__.release_xfer_handle(handle)
