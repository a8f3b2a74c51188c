"""The ranks of a heterogeneous peer with which this worker has shaken hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kvpatch.geometry.overlap import Overlap, Region, overlaps_of
from kvpatch.geometry.plane import HeadName, Plane, names_of_heads, planes_without
from kvpatch.geometry.plane_copies import missing_heads
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.remote_states import RemoteStates


class Rest(NamedTuple):
    """The part of a rank that is read, once other ranks of its peer are read too.

    Attributes:
        overlaps: the copies of local heads that none of the other ranks has.
        taken: the local heads that the other ranks have.
        is_nothing: True if the other ranks have all local heads that this rank has.
    """

    overlaps: tuple[Overlap, ...]
    taken: frozenset[HeadName] = frozenset()
    is_nothing: bool = False


@dataclass(eq=False)
class RemoteRank:
    """A rank of a peer: what it stated, where its layers overlap ours, its name to NIXL."""

    metadata: AgentMetadata
    regions: tuple[Region, ...]
    overlaps: tuple[Overlap, ...]
    agent: str = ""
    states: Mapping[str, RemoteStates] = field(default_factory=dict)
    _rests: dict[tuple[RemoteRank, ...], Rest] = field(default_factory=dict, init=False)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(plane for region in self.regions for plane in region)

    @cached_property
    def block_tokens(self) -> Mapping[str, int]:
        """Returns the tokens of its kernel blocks, by layer."""
        return {plane.layer: plane.counts.block_tokens for plane in self.planes}

    @cached_property
    def heads(self) -> frozenset[HeadName]:
        """Every head of every content of every layer that it holds."""
        return names_of_heads(self.planes)

    def behind(self, others: tuple[RemoteRank, ...], local: Sequence[Plane]) -> Rest:
        """Returns the part of this rank that is read once `others` are read: heads they lack.

        Each head is read from one rank. Copies on several ranks may differ in their bytes: matrices
        of other shapes are multiplied in other orders, at least on a CPU.
        """
        if not others:
            return Rest(self.overlaps)
        found = self._rests.get(others)  # each request has the same ones
        if found is None:
            held = others[0].heads.union(*(one.heads for one in others[1:]))
            taken = held & names_of_heads(local)
            found = Rest(self.overlaps, taken)
            if taken & self.heads:
                overlaps = overlaps_of(self.regions, planes_without(local, taken))
                found = Rest(overlaps, taken, is_nothing=not overlaps)
            self._rests[others] = found
        return found


@dataclass
class Peer:
    """A heterogeneous peer, as far as its ranks have shaken hands.

    Attributes:
        missing: a head of ours that none of the ranks holds, in words.
    """

    ranks: dict[int, RemoteRank] = field(default_factory=dict)
    missing: str | None = None

    def add(self, rank: RemoteRank, local: Sequence[Plane]) -> None:
        """Books a rank, and what is still missing of our planes."""
        self.ranks[rank.metadata.tp_rank] = rank
        held = [plane for rank in self.ranks.values() for plane in rank.planes]
        missing = missing_heads(held, local)
        self.missing = None
        if missing:
            layer, content, head = missing[0]
            self.missing = f"{content.value} head {head} of layer {layer}"
