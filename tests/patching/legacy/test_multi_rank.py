"""Which ranks of a larger peer each of our ranks reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpatch.legacy.unlike_engines import ranks_to_read
from kvpatch.peer.block_shapes import heads_of

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
