"""What a rank of a P of another release states, in our vocabulary."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from kvpatch.connector.handshake.agent_metadata import AgentMetadata, read_agent_metadata
from kvpatch.connector.unlike_releases.peer_releases import Statement
from kvpatch.connector.unlike_releases.translation import layout_as
from kvpatch.core.releases import ReleaseFacts


def read_statement(
    statement: Statement, own: ReleaseFacts, tp_rank: int, tp_size: int
) -> AgentMetadata:
    """What a rank of another release states, in our vocabulary.

    Raises:
        PeerRefused: it states what cannot be true.
    """
    stated = SimpleNamespace(**statement.fields)
    peer = read_agent_metadata(stated, statement.facts, tp_rank, tp_size)
    return replace(peer, layout=layout_as(peer.layout, own), releases=statement.releases)
