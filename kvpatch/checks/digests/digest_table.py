"""The table of one worker's digests, in host memory that peers can read.

Each request has an entry in a directory, by its hold's word, which says where in a ring its digests
lie, and what their check sum is: a ring goes round, and what a peer reads may have become another
request's. Behind the ring there is room for what this worker reads of its peers.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from kvpatch.checks.tables import WORD_BYTES, PeerTable

_LOG = logging.getLogger("kvpatch.digests")

#: Of one request's digests on one rank; with larger ranges of tokens any request's have room.
MOST_BYTES = 256 * 1024

_SLOTS = 1 << 12
_ENTRY_WORDS = 4
ENTRY_BYTES = _ENTRY_WORDS * WORD_BYTES
_RING_START = _SLOTS * ENTRY_BYTES
_RING_END = _RING_START + 16 * 1024**2

#: Of a word: there are no digests of this request, and there will be none.
_NONE = 1


class Entry(NamedTuple):
    """The directory's entry for a request.

    Attributes:
        word: the word of its hold; the lowest bit is set where it has no digests.
        start: where its digests start, in bytes from the table's beginning.
        size_bytes: the size of its digests.
        check: the check sum of its digests.
    """

    word: int
    start: int
    size_bytes: int
    check: int

    def says(self, generation: int) -> bool:
        inside = _RING_START <= self.start <= self.start + self.size_bytes <= _RING_END
        return self.word == generation and 0 < self.size_bytes <= MOST_BYTES and inside


class DigestTable(PeerTable):
    """The table of one worker's digests, with room for those of peers that it reads."""

    landing_start = _RING_END
    landings = 16
    landing_bytes = MOST_BYTES

    def __init__(self, nixl: Any) -> None:
        super().__init__(nixl)
        self._words = self._bytes[:_RING_START].view(np.uint64)
        self._next = _RING_START
        self._doubted: set[str] = set()

    def write(self, generation: int, content: bytes | None) -> None:
        """Writes down a request's digests; by one thread.

        Args:
            content: None where there are none.
        """
        at = _slot(generation) * _ENTRY_WORDS
        self._words[at] = 0
        if content is None or not 0 < len(content) <= MOST_BYTES:
            self._words[at] = generation | _NONE
            return
        if self._next + len(content) > _RING_END:
            self._next = _RING_START
        start, self._next = self._next, self._next + len(content) + -len(content) % WORD_BYTES
        self._bytes[start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
        self._words[at + 1 : at + _ENTRY_WORDS] = start, len(content), crc32(content)
        self._words[at] = generation

    def doubt(self, agent: str, why: object) -> None:
        """Logs why a load is not checked: the first of a peer's so that it is seen."""
        level = logging.DEBUG if agent in self._doubted else logging.WARNING
        self._doubted.add(agent)
        _LOG.log(level, "a load is not checked by its digest: %s", why)


def entry_address(table: int, generation: int) -> int:
    return table + _slot(generation) * ENTRY_BYTES


def _slot(generation: int) -> int:
    return (generation >> 1) % _SLOTS
