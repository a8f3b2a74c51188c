"""A request of a peer of smaller blocks: the release reads it rightly, or it fails alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpatch.core.errors import KvpatchError, ReadRefused, UnexpectedRead
from kvpatch.core.proxies import ObjectProxy
from kvpatch.load import read_request
from kvpatch.load.smaller_blocks import shares_tokens
from kvpatch.load.smaller_blocks_pairing import Pairing, mend_pairing
from kvpatch.transfer.nixl import tell_over
from kvpatch.worker.state import worker_state


@contextmanager
def paired(worker: Any, meta: Any, pairing: Pairing) -> Iterator[None]:
    """While inside, the release reads a request of a peer of smaller blocks, or fails it."""
    try:
        mend_pairing(worker, meta, pairing)
    except (ReadRefused, UnexpectedRead) as error:
        worker_state(worker).book.refuse(error)
        read_request.replace_remote_blocks(meta, _preparable(worker, meta, pairing), pairing.facts)
        with refusing(worker, pairing.engine_id, error):
            yield
    else:
        yield


class _RefusingAgent(ObjectProxy):
    """Raises where the release prepares a transfer: there it makes one failed load of it."""

    def __init__(self, agent: Any, worker: Any, engine_id: str, error: KvpatchError) -> None:
        super().__init__(agent)
        self._self_worker = worker
        self._self_engine_id = engine_id
        self._self_error = error

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
        """Raises:
        KvpatchError: always; P is told that nobody will read its blocks.
        """
        agents = _agents_behind(self._self_worker, self._self_engine_id, remote_handle)
        tell_over(self.__wrapped__, agents, notif_msg)
        raise self._self_error


def _preparable(worker: Any, meta: Any, pairing: Pairing) -> list[list[int]]:
    """As many blocks of P's, all of them block 0, as have the release prepare a transfer."""
    theirs = pairing.theirs
    ratio = 1.0 if theirs is None else pairing.ours.tokens / theirs.tokens
    lengths = []
    for group, local in zip(pairing.groups, read_request.groups(meta.local_block_ids), strict=True):
        length = len(local) if group.has_state else math.ceil(len(local) * ratio)
        if shares_tokens(worker, pairing.engine_id, pairing.facts):
            in_front = max(meta.local_num_computed_blocks, default=0) + 1
            length = (length + in_front) * worker.dcp_size
        lengths.append(length)
    return [[0] * length for length in lengths]


@contextmanager
def refusing(worker: Any, engine_id: str, error: KvpatchError) -> Iterator[None]:
    """While inside, a transfer that the release prepares fails with this error."""
    agent = worker.nixl_wrapper
    worker.nixl_wrapper = _RefusingAgent(agent, worker, engine_id, error)
    try:
        yield
    finally:
        worker.nixl_wrapper = agent


def _agents_behind(worker: Any, engine_id: str, handle: Any) -> list[str]:
    """NIXL's names of the ranks that a handle of prepared descriptors stands for."""
    handles = worker.dst_xfer_side_handles[engine_id]
    agents = worker._remote_agents[engine_id]
    if not isinstance(handles, Mapping):  # <= 0.13: one rank
        return list(agents.values())
    ranks = [rank for rank, found in handles.items() if found == handle]
    names = (agents.get(rank, agents.get((0, rank))) for rank in ranks)  # pairs from 0.27
    return [name for name in names if name is not None]
