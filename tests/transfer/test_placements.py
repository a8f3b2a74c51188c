"""A read's copies that fail: each gives its space back, and none keeps the read alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvpatch.transfer.placements import Placements


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


def _placed(*spaces: str) -> tuple[Any, _Pool]:
    caches, pool = _Caches(), _Pool()
    made: Any = Placements(caches, pool, (ValueError,))  # type: ignore[arg-type]
    for space in spaces:
        made.place(space, ())
    assert made.give_back() is False
    caches.may_end = True
    return made, pool


def test_each_failure_is_told_and_every_space_comes_back():
    made, pool = _placed("bad 1", "good 1", "bad 2", "good 2")
    for name in ("bad 1", "bad 2"):
        with pytest.raises(ValueError, match=name):
            made.give_back()
    assert made.give_back() is True
    assert sorted(pool.given) == ["bad 1", "bad 2", "good 1", "good 2"]
    assert not made


def test_who_has_failed_is_collected_at_once():
    """A read's space is given back when it is: no error may hold what it was raised in."""
    made, _ = _placed("bad")
    gone = weakref.ref(made)
    gc.disable()
    try:
        try:
            made.give_back()
        except ValueError:
            del made
        assert gone() is None
    finally:
        gc.enable()
