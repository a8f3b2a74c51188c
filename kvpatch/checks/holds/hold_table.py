"""One worker's table of the holds on its blocks, in host memory that peers can read.

A peer that has read a request's blocks reads the word of its hold after them. The worker takes
the word out before it says that the blocks may be given away, so that a word that still stands
there proves of every byte that was read before it that it was read in time. Nobody waits for
this worker: it may be in a long step, or in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch.checks.tables import WORD_BYTES, PeerTable

#: Requests whose blocks are held at the same time; a later one takes the place of the first.
_SLOTS = 1 << 16
#: Words of peers that are read at the same time.
_LANDINGS = 1 << 12
#: Loads in a row of which a peer's word could not be read, before it is asked no more.
MOST_MISSED = 3
TABLE_BYTES = (_SLOTS + _LANDINGS) * WORD_BYTES

_COUNT_BITS = 31
_ENDED = 1


def generation_of(start: int, count: int) -> int:
    """The word of an engine's hold: never 0, and never that of another start of the engine.

    Args:
        start: 32 random bits of this start.
        count: of the holds since.
    """
    return start << 32 | (count & ((1 << _COUNT_BITS) - 1)) << 1


def is_still_to_come(found: int, generation: int) -> bool:
    """True if a worker may not have heard of a hold yet, by what stands in its place."""
    if found == 0:
        return True
    is_of_this_start = found >> 32 == generation >> 32
    return is_of_this_start and found >> 1 < generation >> 1


class HoldTable(PeerTable):
    """One worker's holds, and the words of its peers that it reads."""

    size_bytes = TABLE_BYTES
    landings = range(_SLOTS, _SLOTS + _LANDINGS)

    def __init__(self, nixl: Any) -> None:
        super().__init__(nixl)
        self._words = self._bytes.view(np.uint64)
        #: By request, of this worker's own.
        self._held: dict[str, int] = {}
        #: Loads in a row of which the data could be read and the word could not, by NIXL's name of
        #: the rank and the place of its table.
        self.missed: Counter[tuple[str, int]] = Counter()

    # --- the side that is read --------------------------------------------------

    def hold(self, request_id: str, generation: int) -> None:
        """Writes a hold down, in place of an earlier one of the same request."""
        self.end(request_id)
        self._held[request_id] = generation
        self._words[_slot(generation)] = generation

    def hear(self, changes: Mapping[str, int]) -> None:
        """Writes down what the scheduler has granted and withdrawn."""
        for request_id, generation in changes.items():
            if generation:
                self.hold(request_id, generation)
            else:
                self.end(request_id)

    def is_held(self, request_id: str, generation: int) -> bool:
        """True if a hold's word has not been taken out; for any thread."""
        return self._held.get(request_id) == generation

    def end(self, request_id: str) -> None:
        """Takes a request's word out: its blocks may be given away when this returns."""
        generation = self._held.pop(request_id, None)
        if generation is not None and int(self._words[_slot(generation)]) == generation:
            self._words[_slot(generation)] = generation | _ENDED

    def end_all(self) -> None:
        """Takes all words out: what the blocks hold is about to be lost."""
        for request_id in tuple(self._held):
            self.end(request_id)

    # --- the side that reads ----------------------------------------------------

    def address_of(self, landing: int) -> int:
        return self.address + landing * WORD_BYTES

    def word(self, landing: int) -> int:
        return int(self._words[landing])


def word_address(table: int, generation: int) -> int:
    """Where a hold stands in a peer's table that begins at an address."""
    return table + _slot(generation) * WORD_BYTES


def _slot(generation: int) -> int:
    return (generation >> 1) % _SLOTS
