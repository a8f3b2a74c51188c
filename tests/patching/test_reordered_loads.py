"""Which loads a D on a CPU reorders, by its worker's books; the lab plays it with real engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpatch.core.errors import ReadRefused
from kvpatch.core.releases import FACTS
from kvpatch.load.read_request import note_peer
from kvpatch.patches.unlike_engines import _note_loads, _reorder_received
from kvpatch.worker.state import worker_state

LIKE, OTHER = "one like it", "one of rows"


class _Worker:
    """As far as the release's has it: loads by request, and one flag for all of them."""

    backend_name = "CPU_ATTN"

    def __init__(self) -> None:
        self.enable_heterogeneous_attn_post_process = False
        self._recving_metadata: dict[str, SimpleNamespace] = {}
        self.reordered: list[list[int]] = []
        worker_state(self).facts = FACTS["0.33.0"]

    def load(self, name: str, engine_id: str, blocks: list[int]) -> None:
        remote = SimpleNamespace(engine_id=engine_id)
        self._recving_metadata[name] = SimpleNamespace(
            remote=remote, local_physical_block_ids=[blocks]
        )

    def meet(self, engine_id: str, backend: str) -> None:
        """On a thread of its own, as handshakes are."""
        self.enable_heterogeneous_attn_post_process |= backend != self.backend_name
        note_peer(self, SimpleNamespace(engine_id=engine_id, attn_backend_name=backend))

    def look(self, meanwhile=lambda: None) -> None:
        """Takes all loads as arrived; another thread may do something before it comes to them."""

        def results() -> None:
            meanwhile()
            arrived = [meta.local_physical_block_ids[0] for meta in self._recving_metadata.values()]
            self._recving_metadata.clear()
            if self.enable_heterogeneous_attn_post_process:
                for blocks in arrived:
                    _reorder_received(self.reordered.append, self, blocks)

        _note_loads(self)
        results()


def test_a_peer_that_is_met_while_loads_are_looked_at_leaves_them_as_they_are():
    """The flag goes up between our look and the release's: nothing of that peer can have come."""
    worker = _Worker()
    worker.load("a", LIKE, [1, 2])
    worker.look(meanwhile=lambda: worker.meet(OTHER, "FLASH_ATTN"))
    assert worker.reordered == []
    worker.load("b", OTHER, [3])
    worker.load("c", LIKE, [4])
    worker.look()
    assert worker.reordered == [[3]]


def test_a_load_of_nobody_knows_whom_is_refused():
    worker = _Worker()
    worker.meet(OTHER, "FLASH_ATTN")
    worker.look()
    with pytest.raises(ReadRefused, match="was not on its way"):
        _reorder_received(worker.reordered.append, worker, [1])
