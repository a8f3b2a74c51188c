"""Reads rows of a pool that grows and shrinks, over real NIXL; run by test_elastic.py.

One process with two agents over TCP, so that a transfer takes a while; the pools are
reservations of the lab's stand-in for kvcached's compiled part, registered whole while no
page of them is there. Prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

os.environ["UCX_TLS"] = "tcp"
ROW_BYTES = 1 << 20
ROWS = 96
_MOST_READS = 20
_SECONDS = 60.0


class _Pool:
    """A pool whose page holds one row, registered with an agent of its own."""

    def __init__(self, name: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        from tests.lab.kvcached_standin import Reservation

        self.memory = Reservation(ROWS * ROW_BYTES, ROW_BYTES)
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        whole = [(self.memory.address, self.memory.size_bytes, 0, "")]
        self.agent.register_memory(self.agent.get_reg_descs(whole, "DRAM"))

    def fill(self, row: int, number: int) -> None:
        self.memory.map(row)
        self.memory.bytes_at(row).view(np.uint32)[:] = _contents(number)


def _contents(number: int) -> Any:
    return np.arange(ROW_BYTES // 4, dtype=np.uint32) * np.uint32(2 * number + 1)


class _Ends:
    """P's and D's pools, and reads between them."""

    def __init__(self) -> None:
        self.prefill, self.decode = _Pool("prefill"), _Pool("decode")
        self.name = self.decode.agent.add_remote_agent(self.prefill.agent.get_agent_metadata())
        self.number = 0

    def read(self, remote: list[int], local: list[int], meanwhile: Any = None) -> dict[str, Any]:
        """Reads rows; ``meanwhile`` is called over and over until they are there."""
        from kvpatch.geometry.tensor_facts import Memory
        from kvpatch.transfer.nixl import Ends, prepare_read

        self.number += 1
        for row in remote:
            self.prefill.fill(row, 1000 * self.number + row)
        for row in local:
            self.decode.memory.map(row)
        ends = Ends(Memory("DRAM"), Memory("DRAM"), self.name)
        source, target = self.prefill.memory.address, self.decode.memory.address
        handle = prepare_read(
            self.decode.agent,
            ends,
            np.array([source + row * ROW_BYTES for row in remote]),
            np.array([target + row * ROW_BYTES for row in local]),
            np.full(len(remote), ROW_BYTES),
        )
        state, resizes, end = self.decode.agent.transfer(handle), 0, time.monotonic() + _SECONDS
        while state == "PROC" and time.monotonic() < end:
            if meanwhile is not None:
                meanwhile()
                resizes += 1
            state = self.decode.agent.check_xfer_state(handle)
        wrong = 0
        for theirs, ours in zip(remote, local, strict=True):
            found = self.decode.memory.bytes_at(ours).view(np.uint32)
            wrong += int(np.count_nonzero(found != _contents(1000 * self.number + theirs)))
        return {"state": state, "resizes": resizes, "wrong": wrong}


def resize() -> dict[str, Any]:
    """Both pools change in mid-transfer; then pages that were not there are read, twice."""
    ends = _Ends()
    remote, local = list(range(0, ROWS, 2))[:40], list(range(1, ROWS, 2))[:40]
    others = [
        (ends.prefill.memory, [row for row in range(ROWS) if row not in remote]),
        (ends.decode.memory, [row for row in range(ROWS) if row not in local]),
    ]
    turn = 0

    def meanwhile() -> None:
        nonlocal turn
        for memory, rows in others:
            for step in range(8):
                row = rows[(8 * turn + step) % len(rows)]
                memory.unmap(row) if row in memory.mapped else memory.map(row)
        turn += 1

    found = {"meanwhile": ends.read(remote, local, meanwhile)}
    for _ in range(_MOST_READS - 1):  # on a busy machine one may be over as soon as it is posted
        if found["meanwhile"]["resizes"] or found["meanwhile"]["wrong"]:
            break
        found["meanwhile"] = ends.read(remote, local, meanwhile)
    for row in remote:
        ends.prefill.memory.unmap(row)
    for row in local:
        ends.decode.memory.unmap(row)
    found["grown"] = ends.read([1, 3, 5], [0, 2, 4])
    found["again"] = ends.read(remote[:3], local[:3])
    control = ends.decode.memory.bytes_at(local[0]).view(np.uint32)
    control[7] ^= 1
    changed = control != _contents(1000 * ends.number + remote[0])
    found["control"] = {"wrong": int(np.count_nonzero(changed))}
    return found


def stray() -> dict[str, Any]:
    """Reads a row that is not there, whose bytes must not pass for a row's."""
    ends = _Ends()
    ends.read([2, 4], [2, 4])
    fill = ends.prefill.fill
    ends.prefill.fill = lambda row, number: None  # type: ignore[method-assign]
    found = ends.read([6], [6])
    ends.prefill.fill = fill  # type: ignore[method-assign]
    return {"stray": found}


if __name__ == "__main__":
    print(json.dumps({"resize": resize, "stray": stray}[sys.argv[1]]()), flush=True)
    os._exit(0)
