"""Which of a release's tests a run plays: a share that changes, of all but the newest release.

The lab takes hours on two cores. The gate plays the newest release whole. Of the newest release of
each other generation it plays the tests marked ``every_release``, and of the rest one part of
several. Which part a test is in, with all its parameters, depends on the release too: a run meets
each test on some releases, and as many runs as there are parts meet it on all.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest
from allpairspy import AllPairs

from .releases import is_full

_VARIABLE = "KVPATCH_TEST_SHARE"


@dataclass(frozen=True)
class Share:
    """One part of several, counted from 0."""

    part: int
    parts: int

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def has(self, test: str, releases: Sequence[str], release: str) -> bool:
        """Whether this part has a test on a release; each of `releases` is in one part.

        Args:
            test: its name without parameters.
            releases: all that the test is for.
        """
        return (crc32(test.encode()) + releases.index(release)) % self.parts == self.part


def share() -> Share | None:
    """The share that ``KVPATCH_TEST_SHARE`` asks for, ``2/6`` say; None for all there is.

    Raises:
        ValueError: the variable has another form.
    """
    wanted = os.environ.get(_VARIABLE, "")
    if not wanted:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", wanted)
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError(f"{_VARIABLE}={wanted!r}: expected PART/PARTS, 0/6 to 5/6 say")
    return Share(int(found[1]), int(found[2]))


def some_of(*dimensions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every pair of values of any two of three dimensions or more; all there is in full runs."""
    found = [list(dimension) for dimension in dimensions]
    rows = itertools.product(*found) if is_full() else AllPairs(found)
    return [tuple(row) for row in rows]


def in_turns(cases: Iterable[Any], values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each case with one of the values, by turns; with every one in full runs."""
    if is_full():
        return list(itertools.product(cases, values))
    return [(case, values[turn % len(values)]) for turn, case in enumerate(cases)]


def on_every_release(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """Parameters of a test, of which the chosen ones are in every share.

    Raises:
        ValueError: one of the chosen is not among the names.
    """
    listed = list(names)
    unknown = sorted(set(chosen) - set(listed))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join(listed)}")
    mark = pytest.mark.every_release
    return [pytest.param(name, marks=mark) if name in chosen else name for name in listed]
