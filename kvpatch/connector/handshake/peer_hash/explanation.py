"""Which factors of a peer's compatibility hash differ from ours: found by hashing alternatives.

A hash tells nothing but whether it is the same. The factors of which all values are known are
tried, one and two at a time, until what comes out is the peer's hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

from kvpatch.connector.handshake.peer_hash import factors
from kvpatch.connector.handshake.peer_hash.factors import OwnFactors
from kvpatch.connector.handshake.peer_hash.frames import Frame, frame_of, other_frames, release_of
from kvpatch.core.hash_values import BACKENDS, CACHE_DTYPES, DTYPES

#: How long a hash is looked for.
SECONDS = 1.0
#: Hashes between two pauses, in which the engine's own threads go on; some 0.2 ms.
_BATCH = 100
_PAUSE_SECONDS = 0.00005
_NEWEST_CONNECTOR = 40
#: Versions that are tried with two differences beside them: releases as we are built, and plain.
_LIKELY_FRAMES = 70

#: What a factor other than the version can be, those first that are met most.
_VALUES: dict[str, tuple[Any, ...]] = {
    factors.BACKEND: BACKENDS,
    factors.HYBRID: (False, True),
    factors.CACHE_DTYPE: CACHE_DTYPES,
    factors.CROSS_LAYERS: (False, True),
    factors.DTYPE: DTYPES,
    factors.MODE: ("pull", "push"),
    factors.SPECULATION: (None,),
    factors.CONNECTOR_VERSION: tuple(range(1, _NEWEST_CONNECTOR + 1)),
}


@dataclass(frozen=True)
class Difference:
    """A factor, by the release's own name for it, and what it is on both sides."""

    factor: str
    theirs: Any
    ours: Any


@dataclass(frozen=True)
class Explanation:
    """What a peer is, for its hash to be what it is.

    Attributes:
        differences: from us; one at least.
        version: of its vLLM, as it states it.
        release: of the table, that the version is a build of; empty where there is none.
        backend: its attention backend.
        cache_dtype: the type of its cache.
    """

    differences: tuple[Difference, ...]
    version: str
    release: str
    backend: str
    cache_dtype: str

    @property
    def factors(self) -> frozenset[str]:
        """The names of what differs."""
        return frozenset(difference.factor for difference in self.differences)


class Search:
    """For what differs at a peer with another hash than ours; it can be gone on with.

    Args:
        peer_hash: anything that a peer may state.
        now: tells the time in seconds.
    """

    def __init__(
        self, own: OwnFactors, peer_hash: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._own, self._now = own, now
        self._candidates: Iterator[_Candidate] = iter(())
        try:
            self._wanted = bytes.fromhex(peer_hash)
        except ValueError:
            return
        self._candidates = _candidates(own)

    #: What differs; None where it has not been found.
    found: Explanation | None = None
    #: Whether there is nothing more to try.
    is_over = False

    def go_on(self, seconds: float = SECONDS) -> None:
        """Takes so long at most, and pauses all the while for other threads."""
        end = self._now() + seconds
        while not self.is_over:
            batch = list(islice(self._candidates, _BATCH))
            for fragments, frame, changed in batch:
                if factors.digest_of_fragments(fragments) == self._wanted:
                    self.found = _explanation(self._own, frame, dict(changed))
                    self.is_over = True
                    return
            self.is_over = not batch
            if self._now() > end:
                return
            time.sleep(_PAUSE_SECONDS)


#: What would be hashed of a peer, its version, and what differs beside that: (factor, value).
_Candidate = tuple[Sequence[str], Frame, Sequence[tuple[str, Any]]]
#: A factor's other values, each as it would be hashed.
_Alternatives = Mapping[str, Sequence[tuple[tuple[str, Any], str]]]


def _candidates(own: OwnFactors) -> Iterator[_Candidate]:
    """One difference, then two; another version counts as one."""
    ours = frame_of(own.values[factors.VERSION], own.facts)
    others = [f for f in other_frames(ours.version, own.facts) if _is_known(own, f)]
    every = {name: _alternatives(own, name) for name in _VALUES}
    # The connector's version comes with vLLM's.
    of_others = {n: found for n, found in every.items() if n != factors.CONNECTOR_VERSION}
    yield from _with_changes(own, ours, every, 1)
    for frame in others:
        yield from _with_changes(own, frame, {}, 0)
    yield from _with_changes(own, ours, every, 2)
    for frame in others:
        yield from _with_changes(own, frame, of_others, 1)
    # Whether groups are on by default has changed between releases.
    both = {name: every[name] for name in (factors.BACKEND, factors.HYBRID)}
    for frame in others[:_LIKELY_FRAMES]:
        yield from _with_changes(own, frame, both, 2)


def _alternatives(own: OwnFactors, name: str) -> list[tuple[tuple[str, Any], str]]:
    values = (value for value in _VALUES[name] if value != own.values.get(name))
    return [((name, value), factors.fragment(name, value)) for value in values]


def _is_known(own: OwnFactors, frame: Frame) -> bool:
    """Whether we know what of us would be hashed there."""
    return frame.facts.hash_factors <= own.values.keys()


def _with_changes(
    own: OwnFactors, frame: Frame, alternatives: _Alternatives, count: int
) -> Iterator[_Candidate]:
    """Every engine of a version that differs from us in so many factors."""
    values = {**own.values, factors.VERSION: frame.version}
    values[factors.CONNECTOR_VERSION] = frame.connector_version
    order = sorted(frame.facts.hash_factors)
    base = [factors.fragment(name, values[name]) for name in order]
    hashed = [name for name in alternatives if name in frame.facts.hash_factors]
    for names in combinations(hashed, count):
        places = [order.index(name) for name in names]
        for found in product(*(alternatives[name] for name in names)):
            fragments = base.copy()
            for place, (_, text) in zip(places, found, strict=True):
                fragments[place] = text
            yield fragments, frame, [changed for changed, _ in found]


def _explanation(own: OwnFactors, frame: Frame, changed: Mapping[str, Any]) -> Explanation:
    differences = [Difference(name, value, own.values[name]) for name, value in changed.items()]
    own_version = own.values[factors.VERSION]
    if frame.version != own_version:
        differences.insert(0, Difference(factors.VERSION, frame.version, own_version))
    values = {**own.values, **changed}
    return Explanation(
        differences=tuple(differences),
        version=frame.version,
        # Ours may be a build that the operator has named a release for.
        release=own.facts.release if frame.version == own_version else release_of(frame.version),
        backend=values[factors.BACKEND],
        cache_dtype=values[factors.CACHE_DTYPE],
    )
