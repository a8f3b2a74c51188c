"""Which ranks of a larger peer each of our ranks reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.legacy.multi_rank import HandshakeWithOneRank, RemoteAgents, ranks_to_read
from kvpatch.peer.block_shapes import heads_of
from kvpatch.worker.state import worker_state

_SIZES = st.sampled_from((1, 2, 3, 4, 6, 8))


@given(_SIZES, _SIZES, st.sampled_from((1, 2, 4, 8, 24)))
def test_ranks_are_read_once_and_hold_our_heads(tp_size: int, ratio: int, heads: int) -> None:
    remote_tp_size = tp_size * ratio
    read = [ranks_to_read(rank, tp_size, remote_tp_size) for rank in range(tp_size)]

    # P frees a request's blocks when each rank was told by as many as it was said to be.
    assert [rank for ranks in read for rank in ranks or ()] == list(range(remote_tp_size))
    for rank, others in enumerate(read):
        held = {
            head
            for other in others or ()
            for first, count in [heads_of(heads, other, remote_tp_size)]
            for head in range(first, first + count)
        }
        first, count = heads_of(heads, rank, tp_size)
        # Of other numbers vLLM makes no engine.
        if all(heads % ranks == 0 or ranks % heads == 0 for ranks in (tp_size, remote_tp_size)):
            assert set(range(first, first + count)) <= held


@pytest.mark.parametrize(("tp_size", "remote"), [(2, 3), (3, 4), (4, 6)])
def test_ranks_that_do_not_divide(tp_size: int, remote: int) -> None:
    assert ranks_to_read(0, tp_size, remote) is None


class _FakeTopology:
    tp_size = 1

    def get_target_remote_rank(self, remote_tp_size: int) -> int:
        return 0 // (self.tp_size // remote_tp_size)


class _FakeWorker:
    """What a release of either form works a rank out from."""

    engine_id = "decode"
    tp_rank = 0

    def __init__(self) -> None:
        self._tp_size = {"decode": 1}
        self.kv_topo = _FakeTopology()
        self.met: list[int] = []

    def rank_of(self, remote_tp_size: int) -> int:
        return self.tp_rank // (self._tp_size[self.engine_id] // remote_tp_size)


def test_a_worker_is_led_to_the_rank_that_it_is_to_ask() -> None:
    worker = _FakeWorker()
    asking = HandshakeWithOneRank(worker, 3, 4)

    assert _FakeWorker.rank_of(asking, 4) == 3
    assert asking.kv_topo.get_target_remote_rank(4) == 3
    asking.met.append(3)
    # Nothing of it is the worker's own.
    assert (worker.tp_rank, worker._tp_size, worker.met) == (0, {"decode": 1}, [3])
    with pytest.raises(ZeroDivisionError):
        worker.rank_of(4)


def test_the_first_rank_stands_for_one_that_was_not_met() -> None:
    met = RemoteAgents({2: "agent-2", 3: "agent-3"})

    assert (met[3], met[1]) == ("agent-3", "agent-2")
    assert set(met.values()) == {"agent-2", "agent-3"}


def test_a_worker_that_asks_for_one_rank_is_that_worker() -> None:
    worker = SimpleNamespace()

    assert worker_state(HandshakeWithOneRank(worker, 1, 2)) is worker_state(worker)
