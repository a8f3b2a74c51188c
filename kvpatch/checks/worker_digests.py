"""The digests of a worker: what it makes for its scheduler's promises, and how it checks loads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpatch.checks.cache_digests import DigestStream, TableTokens, memories_of
from kvpatch.checks.digest_check import (
    MOST_BYTES,
    DigestCheck,
    DigestRead,
    DigestTable,
    seed_of,
)
from kvpatch.checks.digests import Stated, Weights, extents_of, range_tokens_of, written
from kvpatch.checks.grants import DigestOrder, StatedTables, read_promise
from kvpatch.checks.hold_check import HoldCheck
from kvpatch.checks.tables import HoldTable, made_table
from kvpatch.core import settings
from kvpatch.core.errors import KvpatchError
from kvpatch.core.text import one_line
from kvpatch.geometry.plane import Content, Counts, Memory, Plane, Strides
from kvpatch.geometry.segments import BlockList
from kvpatch.geometry.state_shares import Rank
from kvpatch.load.read_request import DIGEST, ReadRequest, groups
from kvpatch.load.reader import CheckLoad, CheckMakers, Reader, RequestContext
from kvpatch.load.token_pairing import filled_state, finished_blocks, loaded_tokens, state_block
from kvpatch.observe.book import ComparedRead
from kvpatch.peer.block_shapes import heads_of
from kvpatch.transfer.lease import Lifetime
from kvpatch.transfer.progress_thread import can_read_beside
from kvpatch.worker.envelope import DIGEST_ORDERS
from kvpatch.worker.recurrent_state import StatePages, tensors_of
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import held_by, worker_state

if TYPE_CHECKING:
    import torch


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
    """The order to make one request's digests.

    Attributes:
        generation: the word of the request's hold.
        is_held: True while the word still stands.
        after: the device work that was queued when the request was over; the stream waits for it.
    """

    generation: int
    tables: Sequence[TableTokens]
    end_token: int
    is_held: Callable[[], bool]
    after: Any


class DigestMaker:
    """The maker of one worker's digests.

    Args:
        table: the table that digests are written to; nothing else writes to it.
        is_sample: True if they are of a sample of the tokens.
    """

    def __init__(self, table: DigestTable, stream: DigestStream, *, is_sample: bool) -> None:
        self.table = table
        self._stream = stream
        self.is_sample = is_sample
        #: Whose request is read.
        self._read: Order | None = None
        self._has_told = False
        #: One for each order that is not begun.
        self._waiting: deque[None] = deque()

    def add(self, order: Order) -> None:
        """Queues an order; the thread drops it if the word of its hold is gone by then."""
        self._waiting.append(None)
        try:
            self._stream.thread.submit(self._make, order, time.monotonic())
        except RuntimeError as error:  # no thread is to be had, or the interpreter ends
            self._waiting.pop()
            self._tell("a request gets no digest: %s", error)
            self.table.write(order.generation, None)  # which no thread writes any more

    def settle(self) -> None:
        """Waits until nothing is read of the cache for a word that is gone, some MiB at most."""
        order = self._read
        # The thread says what it reads before it asks whether the word still stands.
        if order is not None and not order.is_held():
            with self._stream.work:
                pass

    def _make(self, order: Order, came: float) -> None:
        content, waited = None, time.monotonic() - came
        self._waiting.popleft()
        try:
            if waited > _LONGEST_WAIT_SECONDS and len(self._waiting) >= _MOST_WAITING:
                self._tell("requests come faster than they are digested: set KVPATCH_DIGEST=sample")
                return
            with self._stream.work:
                self._read = order
                content = self._made(order)
        except _ERRORS:
            _LOG.warning("a request gets no digest", exc_info=True)
        finally:
            self._read = None
            self.table.write(order.generation, content)

    def _tell(self, what: str, *more: object) -> None:
        """Logs why digests are missing: the first time so that it is seen."""
        _LOG.log(logging.DEBUG if self._has_told else logging.WARNING, what, *more)
        self._has_told = True

    def _made(self, order: Order) -> bytes | None:
        """Makes an order's digests; None where the blocks may belong to another request by now."""
        import torch

        if not order.is_held():
            return None
        weights, parts = Weights(seed_of(order.generation)), []
        cells = sum(table.cells for table in order.tables)
        most = (MOST_BYTES - _HEAD_BYTES) // _CELL_BYTES
        size, is_sample = range_tokens_of(order.end_token, cells, most), self.is_sample
        with torch.inference_mode(), self._stream.inside(order.after):
            for table in order.tables:
                run = table.first_token, table.end_token
                extents = extents_of(*run, size, weights.seed, is_sample=is_sample)
                found = table.digests(extents, size, weights, order.is_held)
                if found is None:
                    return None
                if extents:
                    parts.append(Stated(size, found, is_sample))
        return written(parts) if parts and order.is_held() else None


class DigestChecks:
    """The checks of one worker's loads by digests, and what it digests for its peers."""

    def __init__(self, table: DigestTable, reader: Reader) -> None:
        self._ours, self._groups = ours, groups = reader.ours, reader.groups
        known = list(reader.planes)
        rank, memory = Rank(ours.tp_rank, ours.tp_size), known[0].memory
        known += [_state_plane(name, pages, rank, memory) for name, pages in reader.states.items()]
        self._tensors = {plane.layer: tensors_of(reader.tensors[plane.layer])[0] for plane in known}
        self._memories = memories_of(self._tensors)
        self._by_group = [
            tuple(plane for plane in known if plane.layer in group.layers) for group in groups
        ]
        self.stream = DigestStream(next(iter(self._tensors.values())).device)
        self.maker = DigestMaker(table, self.stream, is_sample=settings.digest() == "sample")

    def _table(self, number: int, blocks: BlockList, extent: tuple[int, int]) -> TableTokens | None:
        """A group's layers and a request's blocks; None where it has none of either.

        Args:
            extent: the tokens that are known to be the request's own.
        """
        planes = self._by_group[number]
        first, end = max(extent[0], blocks.first_token), min(extent[1], blocks.end_token)
        if not planes or first >= end:
            return None
        return TableTokens(self._tensors, self._memories, planes, blocks, first, end)

    def _states(self, number: int, block: int) -> TableTokens | None:
        """A group's recurrent states of a request: a layer's are one token of one block."""
        return self._table(number, BlockList(np.array([block]), 1), (0, 1))

    def check_load(self, context: RequestContext, request: ReadRequest) -> None:
        """Adds the checks that compare what a load's reads bring with what P has."""
        stated = request.stated.get(DIGEST)
        if stated is None or not context.is_as_read:
            return
        try:
            promised = read_promise(stated)
            found = [
                self._table(number, blocks, (first_token, request.tokens))
                for number, blocks, first_token in loaded_tokens(self._ours, self._groups, request)
            ]
        except KvpatchError as error:
            self.maker.table.doubt("a request", error)
            return
        misses = False
        for number, group in enumerate(self._groups):
            blocks = request.local_blocks[number] if group.has_state else ()
            filled = filled_state(blocks)
            if filled is not None:
                found.append(self._states(number, filled))
            misses |= bool(blocks) and filled is None
        tables = [table for table in found if table is not None]
        if promised is not None and tables:
            context.checks.append(partial(self._of_rank, promised, tables, misses))

    def _read_elsewhere(self, rank: Lifetime, ranks: int) -> Collection[Content]:
        """Returns what the release reads from ranks before one that it reads for its states.

        These are latents, and heads that the rank before it has as well. Copies need not be the
        same to the last bit.
        """
        number, ours = rank.number, self._ours
        first = ours.tp_rank * ranks // ours.tp_size
        has_states = any(group.has_state for group in self._groups)
        if not has_states or ranks <= ours.tp_size or number == first:
            return ()
        starts = [heads_of(ours.total_heads, one, ranks)[0] for one in (number - 1, number)]
        heads = (Content.KEY, Content.VALUE) if starts[0] == starts[1] else ()
        return (Content.LATENT, *heads)

    def _of_rank(
        self,
        promised: Sequence[int],
        loaded: Sequence[TableTokens],
        misses: bool,  # noqa: FBT001
        rank: Lifetime,
    ) -> DigestCheck | None:
        """Returns the check of one rank's read; None where nothing checks it, or is in it.

        Args:
            promised: by rank of P's, where its table of digests begins, masked.
            misses: True if the load fills something that nothing is compared with.
        """
        if rank.is_idle:
            return None
        filled = [table.without_heads(rank.taken or ()) for table in loaded]
        if rank.taken is None:
            elsewhere = self._read_elsewhere(rank, len(promised))
            filled = [table.without_contents(elsewhere) for table in filled]
        tables = [table for table in filled if table.planes]
        if not tables:
            return None
        compared = rank.compared = ComparedRead()
        held = next((check for check in rank.checks if isinstance(check, HoldCheck)), None)
        if held is None or rank.mask is None or rank.number >= len(promised):
            return None  # others of its ranks may be compared
        is_part = False
        if rank.taken is None and len(promised) > self._ours.tp_size:
            known = [part for table in tables for part in table.without_open_blocks()]
            is_part = sum(table.rows for table in known) < sum(table.rows for table in tables)
            tables = known
        address, maker = promised[rank.number] ^ rank.mask, self.maker
        fetched = DigestRead(
            maker.table, rank.agent, address, held.generation, is_paced=rank.is_paced
        )
        return DigestCheck(
            *(fetched, tables, rank.request_id, self.stream, compared, maker.is_sample),
            is_part=is_part,
            misses=misses,
        )

    def digest(self, holds: HoldTable, request_id: str, order: DigestOrder, after: Any) -> None:
        """Begins to make the digests of a request; of nothing where it is not known.

        Args:
            after: the device work that was queued by now.
        """
        try:
            blocks = finished_blocks(self._ours, self._groups, groups(order.blocks))
            found = [self._table(*table, (0, order.tokens)) for table in blocks]
            found += [self._states(*states) for states in self._read_states(order)]
        except _ERRORS as error:
            _LOG.debug("request %s gets no digest: %s", one_line(request_id), error)
            found = []
        tables = [table for table in found if table is not None]
        is_held = partial(holds.is_held, request_id, order.generation)
        self.maker.add(Order(order.generation, tables, order.tokens, is_held, after))

    def _read_states(self, order: DigestOrder) -> Iterator[tuple[int, int]]:
        """(group, block) of recurrent states that D reads, where it is known which these are."""
        named, ours = groups(order.named), self._ours
        block_tokens = ours.block_tokens * ours.kernel_blocks_per_block
        for number, group in enumerate(self._groups):
            if group.has_state:
                block = state_block(named[number], order.held, block_tokens)
                if block is not None:
                    yield number, block


def _state_plane(layer: str, pages: StatePages, rank: Rank, memory: Memory) -> Plane:
    """A layer's states as rows of bytes that one rank alone has.

    The rank's number stands where a head's does: one of other ranks has another share of a state,
    and is compared with none.
    """
    size = pages.size_bytes
    return Plane(
        layer,
        Content.STATE,
        pages.address,
        Strides(pages.stride_bytes, size, size, 1),
        Counts(pages.blocks, 1, 1, size),
        item_bytes=1,
        first_head=rank.ranks * (rank.ranks - 1) // 2 + rank.number,
        memory=memory,
    )


def make_table(release: ReleaseWorker) -> None:
    """Makes a worker's table, where digests are asked for and there is one of holds."""
    state = worker_state(release.worker)
    if settings.digest() == "off" or state.held(HoldTable) is None:
        return
    if state.held(DigestTable) is not None:
        return
    table = made_table(release, DigestTable, _LOG, "loads are not checked by digests")
    if table is not None:
        state.of(CheckMakers)["digests"] = partial(_make_checks, table)


def _make_checks(table: DigestTable, release: ReleaseWorker, reader: Reader | None) -> CheckLoad:
    """Returns what checks loads by digests, or counts them where it cannot."""
    state = worker_state(release.worker)
    state.book.has_digests = True
    state.drop(DigestChecks)
    if reader is None or state.is_host_buffered or not _covers(reader):
        _LOG.info("loads are not checked by digests: they do not cover this cache")
        return lambda *_: None
    made = DigestChecks(table, reader)
    state.hold(made)
    state.of(StatedTables)[DIGEST] = table.address
    return made.check_load


def _covers(reader: Reader) -> bool:
    """True if digests tell all of a cache: one device's, without states that no group names."""
    tensors, of_states = reader.tensors, [one.layers for one in reader.groups if one.has_state]
    if not reader.planes or reader.states.keys() != frozenset[str]().union(*of_states):
        return False
    device = next(_all_of(tensors)).device
    # Nor are tensors of several devices one read: vLLM reads those of the host by themselves.
    is_one = all(tensor.device == device for tensor in _all_of(tensors))
    return is_one and can_read_beside(device, reader.caches)


def _all_of(tensors: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Each of a worker's tensors; recurrent states have several each in releases <= 0.26."""
    for found in tensors.values():
        yield from found if isinstance(found, (list, tuple)) else (found,)


def hear(worker: Any, message: Mapping[str, Any]) -> None:
    """Begins to make the digests that the scheduler has promised.

    Before the model runs: D waits, and the step may be one of many long prompts. ``stale_blocks``
    comes first, and the words of new holds stand.
    """
    orders = message.get(DIGEST_ORDERS)
    holds, checks = held_by(worker, HoldTable), held_by(worker, DigestChecks)
    if orders and checks is not None and holds is not None:
        after = checks.stream.mark()
        for request_id, told in orders.items():
            checks.digest(holds, request_id, DigestOrder(*told), after)


def leave_freed(worker: Any, _: Any) -> None:
    """Waits until nothing is read of blocks that the scheduler is about to give away.

    ``stale_blocks`` comes first, and the words of what was sent are gone. It matters where kvcached
    takes the pages from under them: else what is read there is nothing but stale.
    """
    checks = held_by(worker, DigestChecks)
    if checks is not None and settings.is_kvcached_enabled():
        checks.maker.settle()


def leave_caches(worker: Any) -> None:
    """Waits until nothing is read of caches that are about to be let go of.

    ``stale_blocks`` comes first and ends all holds: what is still to be digested is left undone.
    """
    checks = held_by(worker, DigestChecks)
    if checks is not None:
        checks.stream.settle()
