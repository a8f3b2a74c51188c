"""Whose handles of its own blocks in parts a worker makes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from kvpatch.core.releases import FACTS
from kvpatch.load.reader_attachment import blocks_undivided, watch_divided_blocks

DIVIDES = FACTS["0.14.0"]


def _handshake(worker, ratio, made):
    """As every release from 0.14 on does it."""
    if ratio not in worker.src_xfer_handles_by_tp_ratio:
        worker.src_xfer_handles_by_tp_ratio[ratio] = []
        worker.src_xfer_handles_by_tp_ratio[ratio].append(made)


def test_of_a_peer_that_is_read_by_us_none_are_made_and_of_a_like_one_all():
    worker = SimpleNamespace(src_xfer_handles_by_tp_ratio={})
    watch_divided_blocks(worker, DIVIDES)
    with blocks_undivided(worker):
        _handshake(worker, -2, "unlike")
        other = threading.Thread(target=_handshake, args=(worker, -4, "like"))
        other.start()
        other.join()

    assert worker.src_xfer_handles_by_tp_ratio == {-4: ["like"]}
    assert worker.src_xfer_handles_by_tp_ratio[-2][1] is None
    _handshake(worker, -2, "like")
    assert worker.src_xfer_handles_by_tp_ratio[-2] == ["like"]


def test_registering_again_keeps_what_is_there():
    worker = SimpleNamespace(src_xfer_handles_by_tp_ratio={-2: ["like"]})
    watch_divided_blocks(worker, DIVIDES)
    table = worker.src_xfer_handles_by_tp_ratio
    watch_divided_blocks(worker, DIVIDES)
    assert worker.src_xfer_handles_by_tp_ratio is table == {-2: ["like"]}
