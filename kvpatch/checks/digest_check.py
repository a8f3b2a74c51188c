"""The table of a worker's digests, and the check of a read against those of a rank of P."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from kvpatch.checks.cache_digests import DigestStream, TableTokens
from kvpatch.checks.digests import (
    Comparison,
    Extent,
    Place,
    Stated,
    Weights,
    compare,
    extents_of,
    joined,
    read,
    within,
)
from kvpatch.checks.tables import (
    PAUSE_SECONDS,
    WORD_BYTES,
    Patience,
    PeerTable,
    TableRead,
    is_still_to_come,
)
from kvpatch.core.errors import KvpatchError, NoDigest
from kvpatch.core.text import one_line
from kvpatch.geometry.plane import planes_of_heads
from kvpatch.observe.book import ComparedRead
from kvpatch.observe.catalogue import CheckResult, Proof
from kvpatch.transfer.nixl import errors_of

_LOG = logging.getLogger("kvpatch.digests")

# --- the table of one worker's digests, in host memory that peers can read -------------------
#
# Each request has an entry in a directory, by its hold's word, which says where in a ring its
# digests lie, and what their check sum is: a ring goes round, and what a peer reads may have become
# another request's. Behind the ring there is room for what this worker reads of its peers.

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

    def __init__(self, nixl: Any, backends: Sequence[str] = ()) -> None:
        super().__init__(nixl, backends)
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


# --- what is read of a peer's --------------------------------------------------------------------

#: P makes digests in a step after it has answered, and in a thread. Polls of each of: P has not
#: written them, what is on its way does not come, there is no place for it to land.
_MOST_POLLS = 5000
#: Looks at an entry whose digests are not those that it says: it may have been about to change.
_MOST_LOOKS = 3
_MOST_PLACES = 3
_ERRORS: tuple[type[Exception], ...] = (
    *(KvpatchError, RuntimeError, MemoryError, ValueError, IndexError),
)


@dataclass(eq=False)
class DigestRead(TableRead[DigestTable]):
    """The digests of one request, from one rank of a peer."""

    _entry: Entry | None = field(default=None, init=False)
    _looks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._patience = Patience(_MOST_POLLS)

    def answer(self, nixl: Any) -> bytes | None:
        """The digests; None until they are here.

        Args:
            nixl: the agent, as the thread may use it that calls this.

        Raises:
            NoDigest: there are none, or they have not come for long.
            PeerRefused: they cannot be read.
            Exception: NIXL's.
        """
        while True:
            entry = self._entry
            if entry is None:
                remote, size_bytes = entry_address(self.remote_table, self.generation), ENTRY_BYTES
            else:
                remote, size_bytes = self.remote_table + entry.start, entry.size_bytes
            found = self._read(nixl, remote, size_bytes)
            if found is None:
                break
            if entry is None:
                self._look(found)
                if self._entry is None:
                    break
            elif crc32(found) == entry.check:
                self._leave()
                return found
            else:
                self._entry, self._looks = None, self._looks + 1
                if self._looks >= _MOST_LOOKS:
                    raise NoDigest(
                        f"{self.agent} has written other digests over those of a request"
                    )
        if self._handle is None:
            self._leave()  # others have something to fetch while this one waits
        if self._patience.is_over():
            raise NoDigest(
                f"{self.agent}: its digest of a request has not come: it is not written, or many "
                "others are on their way"
            )
        return None

    def _look(self, raw: bytes) -> None:
        entry = Entry(*np.frombuffer(raw, np.uint64).tolist())
        if entry.says(self.generation):
            self._entry = entry
        elif is_still_to_come(entry.word, self.generation):
            self._next = time.monotonic() + PAUSE_SECONDS
        else:
            raise NoDigest(f"{self.agent} has no digest of a request, or none any more")


@dataclass(eq=False)
class DigestCheck:
    """The check of one read, asked once all is in place and P has said that it held the blocks.

    Attributes:
        tables: what the read is a part of, or all.
        stream: where ours are made, and compared: no step waits for that.
        is_sample: whether no more than a sample of them is.
        is_part: whether some of the read's tokens are left out.
        misses: whether something of the load is compared with nothing.
    """

    fetched: DigestRead
    tables: Sequence[TableTokens]
    request_id: str
    stream: DigestStream
    compared: ComparedRead
    is_sample: bool
    is_part: bool = False
    misses: bool = False
    #: The places of other bytes, and what else is known of the read.
    _future: Future[tuple[tuple[Place, ...], Proof]] | None = field(default=None, init=False)
    _is_over: bool = field(default=False, init=False)

    proves_hold = is_due = False

    def ask(self, nixl: Any, *, has_begun: bool) -> CheckResult | None:
        """Returns ``WRONG`` for other bytes than the peer's; None while it is not known.

        Takes no long time. What cannot be compared is ``HELD``: nothing is known of it.

        Args:
            nixl: the agent, as the thread may use it that calls this.
        """
        if self._is_over:
            return CheckResult.HELD
        errors = (*_ERRORS, *errors_of(nixl))
        try:
            if self._future is None:
                content = self.fetched.answer(nixl)
                if content is None:
                    return None
                self._future = self.stream.thread.submit(self._compare, content)
            if not self._future.done():
                return None
            wrong, self.compared.proof = self._future.result()
        except errors as error:
            self.fetched.table.doubt(self.fetched.agent, error)
            wrong = ()
        if wrong:
            self._alarm(wrong)
            self._end(nixl)
            return CheckResult.WRONG
        try:
            self._end(nixl)
        except errors_of(nixl) as error:  # of the digest's own read: nothing is wrong with the load
            _LOG.debug("a digest's read cannot be cancelled: %s", error)
        return CheckResult.HELD

    def release(self, nixl: Any) -> None:
        """Lets go of what is on its way, of a read that has failed or was given up.

        Raises:
            Exception: NIXL's, where it cannot be cancelled.
        """
        if not self._is_over:
            self._end(nixl)

    def _end(self, nixl: Any) -> None:
        """Ends it; when it returns nothing is read of the cache."""
        self._is_over = True
        if not (self._future is None or self._future.cancel() or self._future.done()):
            with self.stream.work:
                pass
        self.fetched.release(nixl)

    def _compare(self, content: bytes) -> tuple[tuple[Place, ...], Proof]:
        """Compares theirs and ours; on the stream's thread."""
        import torch

        weights = Weights(seed_of(self.fetched.generation))
        with torch.inference_mode(), self.stream.inside(), self.stream.work:
            if self._is_over:
                return (), Proof.UNCHECKED
            parts = read(content, weights.seed)
            named = {head[:2] for part in parts for head in part.digests.heads}
            for table in self.tables:
                self.misses |= any((one.layer, one.content) not in named for one in table.planes)
                made = [self._compare_part(table, part, weights) for part in parts]
                if self._is_over:
                    return (), Proof.UNCHECKED
                wrong = tuple(place for found in made if found for place in found.wrong)
                if wrong:
                    return wrong, Proof.ALARM
                self.misses |= not any(found and found.checked for found in made)
                self.misses |= any(found and found.unchecked for found in made)
        if self.misses:
            return (), Proof.UNCHECKED
        return (), Proof.PARTLY if self.is_part else Proof.CHECKED

    def _compare_part(
        self, table: TableTokens, part: Stated, weights: Weights
    ) -> Comparison | None:
        """Compares the part of a table that the rank holds; the rest is read from others."""
        names, planes = frozenset(part.digests.heads), []
        for plane in table.planes:
            known = range(plane.first_head, plane.end_head)
            heads = [head for head in known if (plane.layer, plane.content, head) in names]
            found = planes_of_heads(plane, heads) if heads else []
            self.misses |= bool(heads) and not found  # of a whole that the rank has a part of
            planes += found
        extents = self._extents(table, part, weights.seed)
        if not planes:
            return None
        compared = sum(end - first for first, end in extents)
        is_all = compared >= table.end_token - table.first_token
        self.is_part |= not (is_all or self.is_sample or part.is_sample)
        ours = replace(table, planes=tuple(planes)).digests(
            extents, part.range_tokens, weights, lambda: not self._is_over
        )
        return None if ours is None else compare(part.digests, ours)

    def _extents(self, table: TableTokens, part: Stated, seed: bytes) -> tuple[Extent, ...]:
        """Runs of their ranges that are to be compared: those that we have loaded all of."""
        loaded = within(part, (table.first_token, table.end_token))
        if self.is_sample and not part.is_sample and loaded:
            end_token = part.digests.ranges[-1][1]
            drawn = extents_of(0, end_token, part.range_tokens, seed, is_sample=True)
            loaded = tuple(
                one for run in drawn for one in loaded if run[0] <= one[0] and one[1] <= run[1]
            )
        return joined(loaded)

    def _alarm(self, wrong: Sequence[Place]) -> None:
        places = "; ".join(map(str, wrong[:_MOST_PLACES]))
        more = len(wrong) - _MOST_PLACES
        _LOG.error(
            "request %s, read from %s, is not what P had computed, though P held its blocks to the "
            "last byte: %s%s. The bytes changed on their way, where they were placed here, or in "
            "P's blocks behind its answer: the load fails",
            one_line(self.request_id),
            self.fetched.agent,
            places,
            f"; and {more} more places" if more > 0 else "",
        )
        # Layers are sorted by the numbers in their names.
        self.compared.layer = min(
            (place.layer for place in wrong),
            key=lambda layer: ([int(number) for number in re.findall(r"\d+", layer)], layer),
        )


def seed_of(generation: int) -> bytes:
    """The seed of a request's digests, which both sides know by the word of P's hold."""
    return f"{generation:x}".encode()
