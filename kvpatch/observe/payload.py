"""Samples on their way from workers to the front end, in the release's own statistics.

These are lists by name, which the release extends where it brings workers together. Ours is one
more of them; every payload of a worker has it, be it empty, so that a process without kvpatch
finds it on both sides where it extends one by the other, and shows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpatch.observe.book import Sample
from kvpatch.observe.catalogue import READ_BYTES, READ_SECONDS, READS, Way

#: In a release's statistics, beside its own names.
NAME = "kvpatch"
_SECONDS = 1e-6


def put(stats: Any, samples: Iterable[Sample]) -> None:
    """Adds samples to a release's statistics, as lists: who unpickles them may not know us."""
    stats.data.setdefault(NAME, []).extend(map(list, samples))


def samples_of(data: Mapping[str, Any]) -> list[Any]:
    """The samples in what a release sends; none where there are none."""
    found: list[Any] = data.get(NAME) or []
    return found


def without(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a release has sent of its own."""
    return {name: values for name, values in data.items() if name != NAME}


def count_read(stats: Any, counts: Any) -> None:
    """Adds a read that is done.

    Args:
        counts: NIXL's of a transfer of the release's, or of one of ours, which may have been
            prepared by the release.
    """
    way = getattr(counts, "way", "") or Way.STOCK.value  # NIXL's own has none
    read = ((READS, 1), (READ_BYTES, counts.totalBytes))
    seconds = (READ_SECONDS, counts.xferDuration * _SECONDS)
    put(stats, (Sample(metric.name, way, value) for metric, value in (*read, seconds)))
