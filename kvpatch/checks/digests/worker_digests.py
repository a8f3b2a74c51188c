"""The digests of a worker: its table, and what it makes for its scheduler's promises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from kvpatch.checks.digests.covered import CoveredCaches
from kvpatch.checks.digests.digest_checks import DigestChecks
from kvpatch.checks.digests.digest_maker import DigestMaker, Order
from kvpatch.checks.digests.digest_table import DigestTable
from kvpatch.checks.digests.promised import DigestOrder, orders_in
from kvpatch.checks.digests.table_digests import TableTokens
from kvpatch.checks.holds.hold_table import HoldTable
from kvpatch.core import settings
from kvpatch.core.errors import KvpatchError
from kvpatch.load.read_request import groups
from kvpatch.load.reader import Reader
from kvpatch.load.token_pairing import finished_blocks, state_block
from kvpatch.transfer.nixl import errors_of
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.digests")

#: Of lists of blocks that are none of this cache's: P's step goes on without a digest.
_ERRORS = KvpatchError, ValueError, IndexError


def make_table(release: ReleaseWorker) -> None:
    """Makes a worker's table, where digests are asked for and there is one of holds."""
    worker, state = release.worker, worker_state(release.worker)
    if settings.digest() == "off" or state.held(HoldTable) is None:
        return
    if state.held(DigestTable) is not None:
        return
    errors: tuple[type[Exception], ...] = RuntimeError, MemoryError
    errors += errors_of(worker.nixl_wrapper)
    try:
        state.hold(DigestTable(worker.nixl_wrapper))
    except errors as error:
        _LOG.warning("loads are not checked by digests: no host memory for it: %s", error)


def stated_address(worker: Any) -> int | None:
    """Where a worker's table is, where it can digest what it holds."""
    state = worker_state(worker)
    reader = state.held(Reader)
    checks = None if reader is None else reader.digest_checks
    return None if checks is None or checks.covered is None else checks.table.address


def hear(worker: Any, metadata: Any) -> None:
    """Has digests made of what the scheduler has promised."""
    orders, state = orders_in(metadata), worker_state(worker)
    holds = state.held(HoldTable)
    reader = state.held(Reader)
    checks = None if reader is None else reader.digest_checks
    covered = None if checks is None else checks.covered
    if not orders or checks is None or covered is None or holds is None:
        return
    maker = state.held(DigestMaker)
    if maker is None:
        maker = DigestMaker(checks.table, is_sample=checks.is_sample)
        state.hold(maker)
    stream = covered.stream
    after = stream.mark()
    for request_id, order in orders.items():
        is_held = partial(holds.is_held, request_id, order.generation)
        tables = _tables(checks, covered, request_id, order)
        maker.add(Order(order.generation, tables, order.tokens, is_held, stream, after))


def end_everything(worker: Any) -> None:
    """Waits until nothing is read of caches that are about to be let go of."""
    state = worker_state(worker)
    holds, maker = state.held(HoldTable), state.held(DigestMaker)
    if holds is not None and maker is not None:
        holds.end_all()  # what is still to be digested is left undone
        maker.settle()


def leave_freed_blocks(worker: Any) -> None:
    """Waits until nothing is read of blocks that the scheduler is about to give away.

    Where kvcached takes the pages from under them: else what is read there is nothing but stale.
    """
    maker = worker_state(worker).held(DigestMaker)
    if maker is not None and settings.is_kvcached_enabled():
        maker.settle()


def _tables(
    checks: DigestChecks, covered: CoveredCaches, request_id: str, order: DigestOrder
) -> list[TableTokens]:
    """What of a request is digested; nothing where that is not known."""
    try:
        tables = finished_blocks(checks.ours, checks.groups, groups(order.blocks))
        extent = 0, order.tokens
        found = [covered.table(number, blocks, extent) for number, blocks in tables]
        for number, block in _states(checks, order):
            found += covered.states(number, block)
    except _ERRORS as error:
        _LOG.debug("request %s gets no digest: %s", request_id, error)
        return []
    return [table for table in found if table is not None]


def _states(checks: DigestChecks, order: DigestOrder) -> Iterator[tuple[int, int]]:
    """(group, block) of the recurrent states that D reads, where it is known which these are."""
    named, ours = groups(order.named), checks.ours
    block_tokens = ours.block_tokens * ours.kernel_blocks_per_block
    for number, group in enumerate(checks.groups):
        block = state_block(named[number], order.held, block_tokens) if group.has_state else None
        if block is not None:
            yield number, block
