"""Handshakes with all ranks of a P of more ranks than D's, where a release asks one (<= 0.13).

There each worker shakes hands with the one rank of its peer that its own number leads to, and
divides by the ratio of ranks, which is 0 here. So it asks once for each rank that it needs, and is
told of a peer of as many ranks as it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.core import seams
from kvpatch.core.errors import PeerRefused
from kvpatch.core.ledger import Site, Wrapper
from kvpatch.core.proxies import ObjectProxy
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.reader import Reader
from kvpatch.worker.state import worker_state


def ranks_to_read(tp_rank: int, tp_size: int, remote_tp_size: int) -> tuple[int, ...] | None:
    """Returns the ranks of a larger peer whose heads one rank holds; None unless all are whole.

    Each rank of the peer is one of ours' alone, and is told by it alone.
    """
    ratio, rest = divmod(remote_tp_size, tp_size)
    return None if rest else tuple(range(tp_rank * ratio, (tp_rank + 1) * ratio))


class HandshakeWithOneRank(ObjectProxy):
    """A worker while it shakes hands with the rank of a peer that we choose.

    The release works out the rank's number as if both sides had as many ranks, and ours were that
    one. Everything else is the worker's own, which other threads go on using.
    """

    def __init__(self, worker: Any, remote_rank: int, remote_tp_size: int) -> None:
        super().__init__(worker)
        self._self_rank = remote_rank
        self._self_tp_size = remote_tp_size

    @property
    def tp_rank(self) -> int:
        """Returns the rank, in releases <= 0.11.0."""
        return self._self_rank

    @property
    def _tp_size(self) -> dict[str, int]:
        """Returns this engine's number of ranks, in releases <= 0.11.0."""
        return {self.engine_id: self._self_tp_size}

    @property
    def kv_topo(self) -> Any:
        """From 0.11.1 on."""
        return _TopologyOfOneRank(self.__wrapped__.kv_topo, self._self_rank)


class _TopologyOfOneRank(ObjectProxy):
    """The release's topology, but for the remote rank that it leads to."""

    def __init__(self, topology: Any, remote_rank: int) -> None:
        super().__init__(topology)
        self._self_rank = remote_rank

    def get_target_remote_rank(self, remote_tp_size: int) -> int:
        return self._self_rank


class RemoteAgents(dict[int, str]):
    """NIXL's names of a peer's ranks, by rank; the first one's for a rank that is not there.

    The release looks for a rank of its own number, to send it a notification.
    """

    def __missing__(self, rank: int) -> str:
        return next(iter(self.values()))


def _nixl_handshake(
    wrapped: Callable[..., Any],
    instance: Any,
    host: str,
    port: int,
    remote_tp_size: int,
    expected_engine_id: str,
) -> Any:
    """Shakes hands with each rank of a larger peer whose heads this one holds."""
    asked = host, port, remote_tp_size, expected_engine_id
    has_more = remote_tp_size > instance.world_size
    is_asking = isinstance(instance, HandshakeWithOneRank)
    if is_asking or worker_state(instance).held(Reader) is None or not has_more:
        return wrapped(*asked)
    ranks = ranks_to_read(instance.tp_rank, instance.world_size, remote_tp_size)
    if ranks is None:
        raise PeerRefused(
            f"engine {expected_engine_id} cannot be read: it has {remote_tp_size} tensor-"
            f"parallel ranks and we have {instance.world_size}",
            "use a --tensor-parallel-size on the prefill side that is a multiple of the decode "
            "side's",
        )
    agents = RemoteAgents()
    for rank in ranks:
        known = instance.dst_xfer_side_handles.pop(expected_engine_id, None)
        if known is not None:  # of the rank before: the release keeps one, ours need none
            instance.nixl_wrapper.release_dlist_handle(known)
        asking = HandshakeWithOneRank(instance, rank, remote_tp_size)
        agents.update(type(instance)._nixl_handshake(asking, *asked))
    return agents


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    return {seams.nixl_handshake(facts): _nixl_handshake}
