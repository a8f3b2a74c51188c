"""Pairs of engines of unlike releases: which there are, and the labs that play them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvpatch.core.releases import GENERATIONS, RELEASES

from .case import Case, EngineSpec, Report
from .host import Lab

#: Labs that are open at a time: each is a process with a release's modules.
_MOST_OPEN = 4

#: Has a release from 0.13 on take a peer whose hash is another, whatever differs.
ANY_HASH: Mapping[str, Any] = MappingProxyType({"enforce_handshake_compat": False})


class Pair(NamedTuple):
    """P's release and D's."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.prefill}-{self.decode}"


def neighbours() -> list[Pair]:
    """Each release with the next one, both ways: P is upgraded first, or D is."""
    found = itertools.pairwise(RELEASES)
    return [pair for old, new in found for pair in (Pair(new, old), Pair(old, new))]


def of_generations() -> list[Pair]:
    """Every ordered pair of generations, by the newest release of each."""
    ends = [releases[-1] for releases in GENERATIONS.values()]
    return [Pair(*pair) for pair in itertools.permutations(ends, 2)]


def all_pairs() -> list[Pair]:
    """Both, each pair once."""
    return list(dict.fromkeys([*neighbours(), *of_generations()]))


def by_nearness(pairs: Iterable[Pair], most_open: int) -> list[Pair]:
    """The same pairs, newest first, so that few labs have to be opened anew.

    All pairs among half as many releases as labs are open at a time come one behind the other,
    then all between these and the next such lot.
    """
    lot = most_open // 2
    found = list(pairs)
    newest_first = sorted({release for pair in found for release in pair}, key=RELEASES.index)[::-1]

    def place(pair: Pair) -> tuple[int, ...]:
        at = [newest_first.index(release) for release in pair]
        return *sorted(order // lot for order in at), *at

    return sorted(found, key=place)


def cases() -> dict[str, Case]:
    """What is played of each pair, by name."""
    found = {}
    for p, d in ((16, 16), (32, 64), (64, 16)):
        name = f"{p} to {d}"
        prefill, decode = (
            EngineSpec("flash", "HND", n, 24, dtype="float32", head_dim=16, own_scheduler=True)
            for n in (p, d)
        )
        found[name] = Case(name, prefill, decode, prompt_tokens=150, prefix_hit_tokens=d)
    return found


class Labs:
    """Labs by release, opened when they are needed; the oldest is closed for a new one.

    ::

        with Labs() as labs:
            report = labs.run(Pair("0.31.0", "0.32.0"), case)
    """

    def __init__(self, most_open: int = _MOST_OPEN) -> None:
        self._most_open = most_open
        self._open: dict[str, Lab] = {}
        self._models = tempfile.TemporaryDirectory(prefix="kvpatch-lab-models-")

    def __enter__(self) -> Labs:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._open.popitem()[1].close()
        self._models.cleanup()

    def of(self, release: str, *kept: str) -> Lab:
        """A release's; those in `kept` stay open."""
        found = self._open.pop(release, None)
        if found is None:
            closable = [name for name in self._open if name not in kept]
            if len(self._open) >= self._most_open:
                self._open.pop(closable[0]).close()
            found = Lab(release, Path(self._models.name)).__enter__()
        self._open[release] = found
        return found

    def run(
        self,
        pair: Pair,
        case: Case,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> Report:
        prefill = self.of(pair.prefill)
        decode = self.of(pair.decode, pair.prefill)
        return decode.run(case, of_prefill=prefill, extra=extra)
