"""Recurrent state of tensor-parallel ranks: which bytes of one rank's are which of another's.

A state is a row of units (channels of a convolution, heads of a state space), one behind the
other. Several parts may follow one another in it, each of which every rank has its own share of:
the first rank of two has the first half of each part, and not the first half of the row. A part
that all heads use (the only group of a Mamba2 model) is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpatch.core.errors import UnplannableCopy


class Rank(NamedTuple):
    number: int
    ranks: int


class Part(NamedTuple):
    """Units that ranks share out evenly, or that each of them has.

    Attributes:
        units: of the whole model.
        is_copied: whether every rank has all of them.
    """

    units: int
    is_copied: bool = False

    def units_of(self, rank: Rank) -> range:
        """The units that a rank has.

        Raises:
            UnplannableCopy: so many ranks cannot have equal shares.
        """
        if self.is_copied:
            return range(self.units)
        if self.units % rank.ranks:
            raise UnplannableCopy(f"{self.units} cannot be shared out over {rank.ranks} ranks")
        share = self.units // rank.ranks
        return range(rank.number * share, (rank.number + 1) * share)


@dataclass(frozen=True)
class SharedState:
    """One state of a layer, of all ranks together.

    Attributes:
        unit_bytes: of one unit, in one piece.
        parts: in the order in which they follow one another on every rank.
    """

    unit_bytes: int
    parts: tuple[Part, ...]

    def size_bytes(self, rank: Rank) -> int:
        """Returns the bytes of a rank's share.

        Raises:
            UnplannableCopy: so many ranks cannot have equal shares.
        """
        return self.unit_bytes * sum(len(part.units_of(rank)) for part in self.parts)


class StateRun(NamedTuple):
    """Bytes in one piece, from where a layer's states begin on either side."""

    remote_offset: int
    local_offset: int
    size_bytes: int


def shared_runs(states: Sequence[SharedState], remote: Rank, local: Rank) -> tuple[StateRun, ...]:
    """Returns the bytes of a remote rank's states that a local rank takes; states lie in sequence.

    All remote ranks together give every byte of the local rank once. A part that several remote
    ranks have is taken from the first one that is read for its other parts.

    Raises:
        UnplannableCopy: one side's ranks cannot have equal shares.
    """
    found: list[StateRun] = []
    for run in _runs(states, remote, local):
        before = found[-1] if found else run
        ends = before.remote_offset + before.size_bytes, before.local_offset + before.size_bytes
        if ends == (run.remote_offset, run.local_offset):
            run = found.pop()._replace(size_bytes=before.size_bytes + run.size_bytes)
        found.append(run)
    return tuple(found)


def _runs(states: Sequence[SharedState], remote: Rank, local: Rank) -> Iterator[StateRun]:
    remote_start = local_start = 0
    # The first of the remote ranks that have some of what the local rank has.
    first_met = local.number * remote.ranks // local.ranks
    for state in states:
        for part in state.parts:
            theirs, ours = part.units_of(remote), part.units_of(local)
            first, end = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
            is_taken = not part.is_copied or remote.number == first_met
            if first < end and is_taken:
                yield StateRun(
                    remote_start + (first - theirs.start) * state.unit_bytes,
                    local_start + (first - ours.start) * state.unit_bytes,
                    (end - first) * state.unit_bytes,
                )
            remote_start += len(theirs) * state.unit_bytes
            local_start += len(ours) * state.unit_bytes
