"""Makes digests of what a worker holds, on a thread: no step waits for it, and an idle one need not
come.

Stale bytes are never blessed: what was read of blocks is written down only if their hold's word
still stood when all of it had been read, and blocks are given away after their word was taken out.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

from kvpatch.checks.digests.digest_check import seed_of
from kvpatch.checks.digests.digest_table import MOST_BYTES, DigestTable
from kvpatch.checks.digests.digest_weights import Weights
from kvpatch.checks.digests.digests import (
    Stated,
    extents_of,
    of_all_ranges,
    range_tokens_of,
    written,
)
from kvpatch.checks.digests.table_digests import DigestStream, TableTokens
from kvpatch.core.errors import KvpatchError
from kvpatch.transfer.cores import use_all_cores

_LOG = logging.getLogger("kvpatch.digests")

#: Of an order, before it is begun: whoever reads the request waits for its digest by then, and
#: what came behind it would be late too.
_LONGEST_WAIT_SECONDS = 2.0
#: Orders that wait then; with fewer the process may have been frozen.
_MOST_WAITING = 8
#: Of an entry, for names and ranges.
_HEAD_BYTES = MOST_BYTES // 4
_CELL_BYTES = 8
_ERRORS = (KvpatchError, RuntimeError, MemoryError, ValueError, IndexError)


class Order(NamedTuple):
    """What is to be digested.

    Attributes:
        generation: the word of the request's hold.
        tables: of the request's tokens.
        end_token: of the request.
        is_held: whether the word still stands.
        stream: where they are made, and
        after: what comes before: what the device had been told when the request was over.
    """

    generation: int
    tables: Sequence[TableTokens]
    end_token: int
    is_held: Callable[[], bool]
    stream: DigestStream
    after: Any


class DigestMaker:
    """One worker's.

    Args:
        table: where digests are written down; by nobody else.
        is_sample: whether they are of a sample of the tokens.
    """

    def __init__(self, table: DigestTable, *, is_sample: bool) -> None:
        self._table = table
        self._is_sample = is_sample
        self._thread = ThreadPoolExecutor(1, "kvpatch-digests", use_all_cores)
        #: Held while the cache is read.
        self._work = Lock()
        #: Whose request is read.
        self._read: Order | None = None
        self._has_told = False
        #: One for each order that is not begun.
        self._waiting: deque[None] = deque()

    def add(self, order: Order) -> None:
        """Has digests made; an order whose word has gone in the meantime is left undone."""
        self._waiting.append(None)
        try:
            self._thread.submit(self._make, order, time.monotonic())
        except RuntimeError as error:  # no thread is to be had, or the interpreter ends
            self._waiting.pop()
            self._tell("a request gets no digest: %s", error)
            self._table.write(order.generation, None)  # which no thread writes any more

    def settle(self) -> None:
        """Waits until nothing is read of the cache for a word that is gone, some MiB at most."""
        order = self._read
        # The thread says what it reads before it asks whether the word still stands.
        if order is not None and not order.is_held():
            with self._work:
                pass

    def _make(self, order: Order, came: float) -> None:
        content, waited = None, time.monotonic() - came
        self._waiting.popleft()
        try:
            if waited > _LONGEST_WAIT_SECONDS and len(self._waiting) >= _MOST_WAITING:
                self._tell("requests come faster than they are digested: set KVPATCH_DIGEST=sample")
                return
            with self._work:
                self._read = order
                content = self._made(order)
        except _ERRORS:
            _LOG.warning("a request gets no digest", exc_info=True)
        finally:
            self._read = None
            self._table.write(order.generation, content)

    def _tell(self, what: str, *more: object) -> None:
        """Logs why digests are missing: the first time so that it is seen."""
        _LOG.log(logging.DEBUG if self._has_told else logging.WARNING, what, *more)
        self._has_told = True

    def _made(self, order: Order) -> bytes | None:
        """What peers are told; None where the blocks may not be the request's any more."""
        import torch

        if not order.is_held():
            return None
        seed = seed_of(order.generation)
        weights, parts = Weights(seed), []
        cells = sum(table.cells for table in order.tables)
        most = (MOST_BYTES - _HEAD_BYTES) // _CELL_BYTES
        size = range_tokens_of(order.end_token, cells, most)
        with torch.inference_mode(), order.stream.inside(order.after):
            for table in order.tables:
                first, end = table.first_token, table.end_token
                extents = extents_of(first, end, size, seed, is_sample=self._is_sample)
                lots = []
                for lot in table.made(extents, size, weights):
                    lots.append(lot)
                    if not order.is_held():
                        return None
                if lots:
                    parts.append(Stated(size, of_all_ranges(lots), self._is_sample))
        return written(parts) if parts and order.is_held() else None
