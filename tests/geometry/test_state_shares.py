"""Recurrent state over unlike ranks, against arrays of the whole model that numpy splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.state_shares import Part, Rank, SharedState, StateRun, shared_runs

_RANKS = (1, 2, 4)

_PARTS = st.builds(Part, st.sampled_from([4, 8, 12, 20]), st.booleans())
_STATES = st.lists(
    st.builds(
        SharedState, st.sampled_from([1, 2, 6]), st.lists(_PARTS, min_size=1, max_size=4).map(tuple)
    ),
    min_size=1,
    max_size=3,
)


def _on_rank(states: Sequence[SharedState], rank: Rank) -> np.ndarray:
    """The bytes of a rank's states as numbers of bytes of the whole model, by numpy alone."""
    found, first = [], 0
    for state in states:
        for part in state.parts:
            size = part.units * state.unit_bytes
            whole = np.arange(first, first + size)
            first += size
            found.append(whole if part.is_copied else np.split(whole, rank.ranks)[rank.number])
    return np.concatenate(found)


def _read(
    states: Sequence[SharedState], remote_ranks: int, local: Rank
) -> tuple[np.ndarray, set[int]]:
    """A local rank's states after reads from remote ranks, each byte once, and those ranks."""
    size = len(_on_rank(states, local))
    found, times = np.full(size, -1), np.zeros(size, dtype=int)
    read = set()
    for number in range(remote_ranks):
        remote = Rank(number, remote_ranks)
        theirs = _on_rank(states, remote)
        for run in shared_runs(states, remote, local):
            here = slice(run.local_offset, run.local_offset + run.size_bytes)
            found[here] = theirs[run.remote_offset : run.remote_offset + run.size_bytes]
            times[here] += 1
            read.add(number)
    assert (times == 1).all()
    return found, read


@given(_STATES, st.sampled_from(_RANKS), st.sampled_from(_RANKS), st.data())
def test_every_byte_comes_once_and_is_the_models(states, remote_ranks, local_ranks, data):
    """From ranks that the local one meets: vLLM shakes hands with these alone."""
    local = Rank(data.draw(st.integers(0, local_ranks - 1)), local_ranks)
    wanted = _on_rank(states, local)

    found, read = _read(states, remote_ranks, local)

    assert (found == wanted).all()
    first = local.number * remote_ranks // local_ranks
    assert read <= set(range(first, first + max(1, remote_ranks // local_ranks)))
    assert sum(state.size_bytes(local) for state in states) == len(wanted)
    assert shared_runs(states, local, local) == (StateRun(0, 0, len(wanted)),), "ranks alike"


#: Mamba2's: 8 channels of x, 4 of B and 4 of C, 3 positions of 2 bytes; 4 heads of 10 bytes.
_MAMBA2 = (SharedState(6, (Part(8), Part(4), Part(4))), SharedState(10, (Part(4),)))


@pytest.mark.parametrize(("remote", "local"), [(Rank(0, 3), Rank(0, 1)), (Rank(0, 1), Rank(0, 8))])
def test_ranks_that_cannot_share_evenly_are_refused(remote, local):
    with pytest.raises(UnplannableCopy, match="cannot be shared out over"):
        shared_runs(_MAMBA2, remote, local)
