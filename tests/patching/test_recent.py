"""What is kept of engines that come and go."""

from __future__ import annotations

import pytest

from kvpatch.core.recent_engines import MOST_ENGINES, RecentEngines
from kvpatch.load.reader import Reader
from kvpatch.peer.remote_ranks import Peer

pytestmark = pytest.mark.patching


def test_the_oldest_is_forgotten_and_the_last_booked_is_not():
    found = RecentEngines[int]()
    for number in range(MOST_ENGINES):
        found[f"e{number}"] = number
    found["e0"] = 7
    found["new"] = 8

    assert len(found) == MOST_ENGINES
    assert "e1" not in found
    assert (found["e0"], found["new"]) == (7, 8)


def _reader(*engines: str) -> Reader:
    """Its books alone; making one takes caches and NIXL."""
    reader = object.__new__(Reader)
    reader.peers = {engine: Peer() for engine in engines}
    reader._unbooked = frozenset()
    return reader


def test_engines_that_the_release_has_let_go_of_are_forgotten_at_the_second_handshake():
    reader = _reader("kept", "gone", "on its way")

    reader.keep(["kept"])
    assert set(reader.peers) == {"kept", "gone", "on its way"}
    reader.keep(["kept", "on its way"])

    assert set(reader.peers) == {"kept", "on its way"}
    reader.keep(["kept"])
    assert set(reader.peers) == {"kept", "on its way"}
