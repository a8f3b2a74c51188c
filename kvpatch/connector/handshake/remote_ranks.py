"""The ranks of a heterogeneous peer with which this worker has shaken hands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvpatch.connector.handshake.agent_metadata import AgentMetadata
from kvpatch.connector.handshake.remote_states import RemoteStates
from kvpatch.geometry.overlap import Overlap
from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.plane_copies import missing_heads
from kvpatch.transfer.read_times import ReadTimes


@dataclass
class RemoteRank:
    """One rank of a peer: what it stated, where its layers overlap ours, its name to NIXL."""

    metadata: AgentMetadata
    planes: tuple[Plane, ...]
    overlaps: tuple[Overlap, ...]
    agent: str = ""
    states: Mapping[str, RemoteStates] = field(default_factory=dict)

    @cached_property
    def block_tokens(self) -> Mapping[str, int]:
        """Of its kernel blocks, by layer."""
        return {plane.layer: plane.counts.block_tokens for plane in self.planes}

    def heads(self) -> Iterator[tuple[str, Content, int]]:
        """Every head of every content of every layer that it holds."""
        for plane in self.planes:
            for head in range(plane.first_head, plane.end_head):
                yield plane.layer, plane.content, head


@dataclass
class Peer:
    """A heterogeneous peer, as far as its ranks have shaken hands.

    Attributes:
        missing: a head of ours that none of the ranks holds, in words.
        times: what reads from it took; forgotten with it.
    """

    ranks: dict[int, RemoteRank] = field(default_factory=dict)
    missing: str | None = None
    times: ReadTimes = field(default_factory=ReadTimes)

    def add(self, rank: RemoteRank, local: Sequence[Plane]) -> None:
        """Books a rank, and what is still missing of our planes."""
        self.ranks[rank.metadata.tp_rank] = rank
        held = [plane for rank in self.ranks.values() for plane in rank.planes]
        missing = missing_heads(held, local)
        self.missing = None
        if missing:
            layer, content, head = missing[0]
            self.missing = f"{content.value} head {head} of layer {layer}"
