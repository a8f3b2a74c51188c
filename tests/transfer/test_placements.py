"""A read's copies that fail: each gives its space back, and none keeps the read alive."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.geometry.plane import Memory
from kvpatch.transfer.nixl import Ends
from kvpatch.transfer.staged_read import StagedRead, _Flight


class _Pool:
    """Stands in for the staging pool: what is given back."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def memory(self, space: object) -> object:
        return space

    def give(self, space: object) -> None:
        self.given.append(space)


class _Caches:
    """Stands in for caches: a copy is over once it may be, or fails then."""

    def __init__(self) -> None:
        self.may_end = False

    def place(self, staging: str, placements: object, after: object) -> Callable[[], bool]:
        def is_placed() -> bool:
            if self.may_end and staging.startswith("bad"):
                raise ValueError(staging)
            return self.may_end

        return is_placed

    def give_up(self, copies: object) -> None:
        """Nothing here goes on by itself."""


def _placed(*spaces: str) -> tuple[StagedRead, _Pool]:
    made: list[Any] = [_Pool(), _Caches()]
    ends = Ends(Memory("DRAM"), Memory("DRAM"), "P")
    read = StagedRead(object(), *made, ends, b"", iter(()), iter(()))
    chunk: Any = SimpleNamespace(placements=())
    for space in spaces:
        read._place(_Flight(None, chunk, space))  # type: ignore[arg-type]
    assert read._give_back() is False
    made[1].may_end = True
    return read, made[0]


def test_each_failure_is_told_and_every_space_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    read, pool = _placed("bad 1", "good 1", "bad 2", "good 2")
    assert read._give_back() is True
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert told == ["bad 1", "bad 2"]
    assert sorted(str(space) for space in pool.given) == ["bad 1", "bad 2", "good 1", "good 2"]
    assert not read._copies


def test_who_has_failed_is_collected_at_once() -> None:
    """A read's space is given back when it is: no error may hold what it was raised in."""
    read, _ = _placed("bad")
    gone = weakref.ref(read)
    gc.disable()
    logging.disable()  # pytest keeps what is logged
    try:
        read._give_back()
        del read
        assert gone() is None
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
