"""Fetches the digests of a rank of P, compares what was read with them, and counts loads."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

from kvpatch.checks.digests.digest_table import ENTRY_BYTES, DigestTable, Entry, entry_address
from kvpatch.checks.digests.digest_weights import Weights
from kvpatch.checks.digests.digests import (
    Comparison,
    Extent,
    Stated,
    columns,
    compare,
    extents_of,
    joined,
    read,
    within,
)
from kvpatch.checks.digests.table_digests import DigestStream, TableTokens
from kvpatch.checks.tables import PAUSE_SECONDS, Patience, TableRead
from kvpatch.core.errors import KvpatchError, NoDigest
from kvpatch.core.text import one_line
from kvpatch.geometry.plane import planes_of_heads
from kvpatch.observe.catalogue import CheckResult, Proof
from kvpatch.transfer.nixl import errors_of

_LOG = logging.getLogger("kvpatch.digests")


@dataclass(eq=False)
class DigestCounts:
    """The counts of one worker's loads since it began, by what a digest proves of them.

    Loads that failed for other reasons are not among them.

    Attributes:
        loads: how many loads had each :class:`Proof`.
        tell: called on any thread for each load; an alarm names the layer that it was found in.
        doubted: peers that owed a digest and did not give it; each is warned of once.
    """

    loads: Counter[Proof] = field(default_factory=Counter)
    tell: Callable[[Proof, str], None] | None = None
    doubted: set[str] = field(default_factory=set)
    #: Loads end on the reads' thread and on the engine's, each under a lock of its own.
    _lock: RLock = field(default_factory=RLock, repr=False)

    def count(self, proof: Proof, layer: str = "") -> None:
        """Books a load.

        Args:
            layer: of an alarm.
        """
        with self._lock:
            self.loads[proof] += 1
        if self.tell is not None:
            self.tell(proof, layer)

    def doubt(self, agent: str, why: object) -> None:
        """Logs why a load is not checked: the first of a peer's so that it is seen."""
        level = logging.DEBUG if agent in self.doubted else logging.WARNING
        self.doubted.add(agent)
        _LOG.log(level, "a load is not checked by its digest: %s", why)


class LoadProof:
    """The proof of one load, which is read from one rank or from several.

    Args:
        counts: the worker's counts.
        request_id: the request's id, as it is logged.
    """

    def __init__(self, counts: DigestCounts, request_id: str) -> None:
        self.counts = counts
        self.request_id = request_id
        self._open = 0
        self._is_sealed = self._is_counted = False
        #: The engine's thread has all reads booked, and the reads' thread ends them. What is
        #: collected while one of them is inside may be another read of the load, which ends there.
        self._lock = RLock()
        #: Of each read that has ended: how well it was checked; None where it has failed.
        self._ended: list[Proof | None] = []

    def begin(self) -> None:
        with self._lock:
            self._open += 1

    def seal(self, *, is_read: bool) -> None:
        """Books that all its reads have been booked.

        Args:
            is_read: whether it is read at all, by whomever.
        """
        with self._lock:
            self._is_sealed = True
            if is_read and not (self._open or self._ended):
                self.counts.count(Proof.UNCHECKED)
            self._count()

    def end(self, found: Proof | None) -> None:
        """Books how one ended.

        Args:
            found: None of a read that has failed, or was given up.
        """
        with self._lock:
            self._open -= 1
            self._ended.append(found)
            self._count()

    def leave(self, found: Proof | None) -> None:
        """Books a read that nothing checks: as :meth:`begin` and :meth:`end`."""
        self.begin()
        self.end(found)

    def alarm(self, layer: str) -> None:
        """Books wrong bytes, and nothing else of the load.

        Args:
            layer: that has some.
        """
        with self._lock:
            self._open -= 1
            is_first, self._is_counted = not self._is_counted, True
            if is_first:
                self.counts.count(Proof.ALARM, layer)

    def _count(self) -> None:
        is_over = self._is_sealed and self._ended and not self._open
        if self._is_counted or not is_over or None in self._ended:
            return
        self._is_counted = True
        worst = (Proof.UNCHECKED, Proof.PARTLY, Proof.CHECKED)
        self.counts.count(next(found for found in worst if found in self._ended))


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
            Exception: NIXL's.
        """
        now = time.monotonic()
        while self._handle is not None or (now >= self._next and self._begin(nixl)):
            state = nixl.check_xfer_state(self._handle)
            if state == "PROC":
                break
            self._let_go(nixl)
            if state != "DONE":
                raise NoDigest(f"{self.agent}: the digest of a request could not be read: {state}")
            entry = self._entry
            if entry is None:
                self._look(now)
                continue
            content = self._checked(entry)
            if content is not None:
                self._leave()
                return content
        if self._handle is None:
            self._leave()  # others have something to fetch while this one waits
        if self._patience.is_over():
            raise NoDigest(
                f"{self.agent}: its digest of a request has not come: it is not written, or many "
                "others are on their way"
            )
        return None

    def _begin(self, nixl: Any) -> bool:
        """Reads the entry, and then what it tells of; whether there is room for it here."""
        if self._landing is None:
            self._landing = self.table.take_landing()
        if self._landing is None:
            return False
        entry = self._entry
        remote = entry_address(self.remote_table, self.generation)
        local, size = self.table.entry_address(self._landing), ENTRY_BYTES
        if entry is not None:
            remote = self.remote_table + entry.start
            local, size = self.table.content_address(self._landing), entry.size_bytes
        self._post(nixl, remote, local, size)
        return True

    def _look(self, now: float) -> None:
        if self._landing is None:
            return
        entry = self.table.entry(self._landing)
        if entry.says(self.generation):
            self._entry = entry
        elif entry.is_to_come(self.generation):
            self._next = now + PAUSE_SECONDS
        else:
            raise NoDigest(f"{self.agent} has no digest of a request, or none any more")

    def _checked(self, entry: Entry) -> bytes | None:
        if self._landing is None:
            return None
        content = self.table.content(self._landing, entry.size_bytes)
        if entry.fits(content):
            return content
        self._entry = None
        self._looks += 1
        if self._looks >= _MOST_LOOKS:
            raise NoDigest(f"{self.agent} has written other digests over those of a request")
        return None


class DigestCheck:
    """The check of one read, asked once all is in place and P has said that it held the blocks.

    Args:
        fetched: the rank's digests.
        tables: what the read is a part of, or all.
        proof: of the load.
        stream: where ours are made, and compared: no step waits for that.
        is_sample: whether no more than a sample of them is.
        is_part: whether something of the read is left out.
    """

    proves_hold = is_due = False

    def __init__(
        self,
        fetched: DigestRead,
        tables: Sequence[TableTokens],
        proof: LoadProof,
        stream: DigestStream,
        *,
        is_sample: bool,
        is_part: bool = False,
    ) -> None:
        self._fetched = fetched
        self._tables = tables
        self._proof = proof
        self._stream = stream
        self._is_sample = is_sample
        #: The first comparison that found other bytes; None if none does.
        self._compared: Future[Comparison | None] | None = None
        self._is_over = False
        #: Whether something of the read was not compared with anything; who is not through with
        #: all of it does not know.
        self._misses = False
        #: Whether some of its tokens were not.
        self._is_part = is_part
        self._is_through = False
        proof.begin()

    def ask(self, nixl: Any, *, has_begun: bool) -> CheckResult | None:
        """Returns ``WRONG`` for other bytes than the peer's."""
        is_well = self.answer(nixl)
        return None if is_well is None else CheckResult.HELD if is_well else CheckResult.WRONG

    def answer(self, nixl: Any) -> bool | None:
        """True if the read may be reported; None while it is not known. Takes no long time.

        What cannot be compared may be: nothing is known of it.

        Args:
            nixl: the agent, as the thread may use it that calls this.
        """
        if self._is_over:
            return True
        errors = (*_ERRORS, *errors_of(nixl))
        try:
            if self._compared is None:
                content = self._fetched.answer(nixl)
                if content is None:
                    return None
                self._compared = self._stream.thread.submit(self._compare, content)
            if not self._compared.done():
                return None
            found = self._compared.result()
        except errors as error:
            self._proof.counts.doubt(self._fetched.agent, error)
            self._misses, found = True, None
        if found is not None:
            self._alarm(found)
            self._end(nixl)
            return False
        is_whole = self._is_through and not self._misses
        of_all = Proof.PARTLY if self._is_part else Proof.CHECKED
        self._proof.end(of_all if is_whole else Proof.UNCHECKED)
        try:
            self._end(nixl)
        except errors_of(nixl) as error:  # of the digest's own read: nothing is wrong with the load
            _LOG.debug("a digest's read cannot be cancelled: %s", error)
        return True

    def release(self, nixl: Any) -> None:
        """Lets go of what is on its way, of a read that has failed or was given up.

        Raises:
            Exception: NIXL's, where it cannot be cancelled.
        """
        if not self._is_over:
            self._proof.end(None)
            self._end(nixl)

    def _end(self, nixl: Any) -> None:
        """Ends it; when it returns nothing is read of the cache."""
        self._is_over = True
        if not (self._compared is None or self._compared.cancel() or self._compared.done()):
            with self._stream.work:
                pass
        self._fetched.release(nixl)

    def _compare(self, content: bytes) -> Comparison | None:
        """Returns the first comparison that finds other bytes; on the stream's thread."""
        import torch

        seed = seed_of(self._fetched.generation)
        with torch.inference_mode(), self._stream.inside():
            lots = self._comparisons(read(content, seed), Weights(seed))
            while True:
                with self._stream.work:
                    found = None if self._is_over else next(lots, None)
                if found is None or found.wrong:
                    return found
                self._misses |= bool(found.unchecked)

    def _comparisons(self, parts: Sequence[Stated], weights: Weights) -> Iterator[Comparison]:
        """Yields what theirs and ours say of each other, some tokens at a time."""
        named = {name for part in parts for name in part.digests.cells}
        for table in self._tables:
            self._misses |= any((one.layer, one.content) not in named for one in table.planes)
            is_compared = False
            for part in parts:
                ours = self._heads_in(table, part)
                if not ours.planes:
                    continue
                extents = self._extents(table, part, weights.seed)
                compared = sum(end - first for first, end in extents)
                is_all = compared >= table.end_token - table.first_token
                self._is_part |= not (is_all or self._is_sample or part.is_sample)
                for found in ours.made(extents, part.range_tokens, weights):
                    is_compared = True
                    yield compare(columns(part.digests, found.ranges), found)
            self._misses |= not is_compared
        self._is_through = True

    def _heads_in(self, table: TableTokens, part: Stated) -> TableTokens:
        """Returns the part of a table that the rank holds; the rest is read from others."""
        planes = []
        for plane in table.planes:
            heads = part.digests.cells.get((plane.layer, plane.content), {})
            found = planes_of_heads(plane, heads)
            has_some = any(plane.first_head <= head < plane.end_head for head in heads)
            self._misses |= has_some and not found  # of a whole that the rank has a part of
            planes += found
        return replace(table, planes=tuple(planes))

    def _extents(self, table: TableTokens, part: Stated, seed: bytes) -> tuple[Extent, ...]:
        """Runs of their ranges that are to be compared: those that we have loaded all of."""
        loaded = within(part, (table.first_token, table.end_token))
        if self._is_sample and not part.is_sample and loaded:
            end_token = part.digests.ranges[-1][1]
            drawn = extents_of(0, end_token, part.range_tokens, seed, is_sample=True)
            loaded = tuple(
                one for run in drawn for one in loaded if run[0] <= one[0] and one[1] <= run[1]
            )
        return joined(loaded)

    def _alarm(self, found: Comparison) -> None:
        places = "; ".join(map(str, found.wrong[:_MOST_PLACES]))
        more = len(found.wrong) - _MOST_PLACES
        _LOG.error(
            "request %s, read from %s, is not what P had computed, though P held its blocks to the "
            "last byte: %s%s. The bytes changed on their way, where they were placed here, or in "
            "P's blocks behind its answer: the load fails",
            one_line(self._proof.request_id),
            self._fetched.agent,
            places,
            f"; and {more} more places" if more > 0 else "",
        )
        self._proof.alarm(min((place.layer for place in found.wrong), key=_place_in_model))


def seed_of(generation: int) -> bytes:
    """The seed of a request's digests, which both sides know by the word of P's hold."""
    return f"{generation:x}".encode()


def _place_in_model(layer: str) -> tuple[list[int], str]:
    """Returns what layers are sorted by: the numbers in their names."""
    return [int(number) for number in re.findall(r"\d+", layer)], layer
