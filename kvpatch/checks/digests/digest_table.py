"""The table of one worker's digests, in host memory that peers can read.

Each request has an entry in a directory, by its hold's word, which says where in a ring its digests
lie, and what their check sum is: a ring goes round, and what a peer reads may have become another
request's. Behind the ring there is room for what this worker reads of its peers.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from kvpatch.checks.tables import WORD_BYTES, PeerTable, is_still_to_come

#: Of one request's digests on one rank; with larger ranges of tokens any request's have room.
MOST_BYTES = 256 * 1024

_SLOTS = 1 << 12
_ENTRY_WORDS = 4
ENTRY_BYTES = _ENTRY_WORDS * WORD_BYTES
_RING_START = _SLOTS * ENTRY_BYTES
_RING_BYTES = 16 * 1024**2
_LANDING_START = _RING_START + _RING_BYTES
_LANDING_BYTES = ENTRY_BYTES + MOST_BYTES
#: Digests of peers that are read at the same time.
_LANDINGS = 16
TABLE_BYTES = _LANDING_START + _LANDINGS * _LANDING_BYTES

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

    def is_to_come(self, generation: int) -> bool:
        return is_still_to_come(self.word, generation)

    def says(self, generation: int) -> bool:
        inside = _RING_START <= self.start <= self.start + self.size_bytes <= _LANDING_START
        return self.word == generation and 0 < self.size_bytes <= MOST_BYTES and inside

    def fits(self, content: bytes) -> bool:
        return crc32(content) == self.check


class DigestTable(PeerTable):
    """The table of one worker's digests, with room for those of peers that it reads."""

    size_bytes = TABLE_BYTES
    landings = range(_LANDINGS)

    def __init__(self, nixl: Any) -> None:
        super().__init__(nixl)
        self._words = self._bytes[:_RING_START].view(np.uint64)
        self._next = _RING_START

    # --- the side that is read --------------------------------------------------

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
        if self._next + len(content) > _LANDING_START:
            self._next = _RING_START
        start, self._next = self._next, self._next + len(content) + -len(content) % WORD_BYTES
        self._bytes[start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
        self._words[at + 1 : at + _ENTRY_WORDS] = start, len(content), crc32(content)
        self._words[at] = generation

    # --- the side that reads ----------------------------------------------------

    def entry_address(self, landing: int) -> int:
        return self.address + _LANDING_START + landing * _LANDING_BYTES

    def content_address(self, landing: int) -> int:
        return self.entry_address(landing) + ENTRY_BYTES

    def entry(self, landing: int) -> Entry:
        start = _LANDING_START + landing * _LANDING_BYTES
        words = self._bytes[start : start + ENTRY_BYTES].view(np.uint64)
        return Entry(*words.tolist())

    def content(self, landing: int, size_bytes: int) -> bytes:
        start = _LANDING_START + landing * _LANDING_BYTES + ENTRY_BYTES
        return self._bytes[start : start + size_bytes].tobytes()


def entry_address(table: int, generation: int) -> int:
    return table + _slot(generation) * ENTRY_BYTES


def _slot(generation: int) -> int:
    return (generation >> 1) % _SLOTS
