"""The digests of a worker: its table, and what it makes for its scheduler's promises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpatch.checks.digests.covered import CoveredCaches
from kvpatch.checks.digests.digest_checks import DigestChecks
from kvpatch.checks.digests.digest_maker import DigestMaker, Order
from kvpatch.checks.digests.digest_table import DigestTable
from kvpatch.checks.digests.load_proof import DigestCounts
from kvpatch.checks.digests.table_digests import TableTokens
from kvpatch.checks.holds.grants import DigestOrder, StatedTables, orders_in
from kvpatch.checks.holds.hold_table import HoldTable
from kvpatch.checks.tables import made_table
from kvpatch.core import settings
from kvpatch.core.errors import KvpatchError
from kvpatch.geometry.state_shares import Rank
from kvpatch.load.prepared_transfers import CheckLoad, CheckMakers
from kvpatch.load.read_request import DIGEST, groups
from kvpatch.load.reader import Reader
from kvpatch.load.token_pairing import finished_blocks, state_block
from kvpatch.observe.book import Book
from kvpatch.observe.catalogue import DIGEST_ALARMS, DIGESTS, Proof
from kvpatch.peer.inspected_caches import InspectedCaches
from kvpatch.transfer.progress_thread import can_read_beside
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import held_by, worker_state

if TYPE_CHECKING:
    import torch

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
    table = made_table(worker, DigestTable, _LOG, "loads are not checked by digests")
    if table is not None:
        state.of(CheckMakers)["digests"] = partial(_make_checks, table)


def _make_checks(
    table: DigestTable, release: ReleaseWorker, own: InspectedCaches, reader: Reader
) -> CheckLoad:
    """Returns what checks loads by digests, or counts them where it cannot."""
    state, tensors = worker_state(release.worker), reader.destination.tensors
    device = next(_all_of(tensors)).device if reader.planes else None
    of_states = [group.layers for group in reader.groups if group.has_state]
    has_others = state.is_host_buffered or device is None
    has_others = has_others or own.states.keys() != frozenset[str]().union(*of_states)
    # Nor are tensors of several devices one read: vLLM reads those of the host by themselves.
    has_others = has_others or any(tensor.device != device for tensor in _all_of(tensors))
    covered = None
    if has_others or not can_read_beside(device, reader.destination.caches):
        _LOG.info("loads are not checked by digests: they do not cover this cache")
    else:
        rank = Rank(reader.ours.tp_rank, reader.ours.tp_size)
        covered = CoveredCaches(tensors, reader.planes, reader.groups, own.states, rank)
    is_sample, counts = settings.digest() == "sample", state.of(DigestCounts)
    counts.tell = partial(_tell, state.book)
    made = DigestChecks(reader.ours, reader.groups, covered, table, counts, is_sample=is_sample)
    state.hold(made)
    if covered is not None:  # else it digests nothing of its own
        state.of(StatedTables)[DIGEST] = table.address
    return made.check_load


def _all_of(tensors: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Each of a worker's tensors; recurrent states have several each in releases <= 0.26."""
    for found in tensors.values():
        yield from found if isinstance(found, (list, tuple)) else (found,)


def _tell(book: Book, proof: Proof, layer: str) -> None:
    book.add(DIGESTS, 1, proof.value)
    if layer:
        book.add(DIGEST_ALARMS, 1, layer)


def hear(worker: Any, metadata: Any) -> None:
    """Has digests made of what the scheduler has promised.

    Before the model runs: D waits, and the step may be one of many long prompts. ``stale_blocks``
    comes first, and the words of new holds stand.
    """
    if held_by(worker, DigestTable) is None:
        return
    orders, state = orders_in(metadata), worker_state(worker)
    holds, checks = state.held(HoldTable), state.held(DigestChecks)
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


def leave_freed(worker: Any, _: Any) -> None:
    """Waits until nothing is read of blocks that the scheduler is about to give away.

    ``stale_blocks`` comes first, and the words of what was sent are gone. It matters where kvcached
    takes the pages from under them: else what is read there is nothing but stale.
    """
    maker = held_by(worker, DigestMaker)
    if maker is not None and settings.is_kvcached_enabled():
        maker.settle()


def unregister_kv_caches(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Waits until nothing is read of caches that are about to be let go of."""
    holds, maker = held_by(instance, HoldTable), held_by(instance, DigestMaker)
    if holds is not None and maker is not None:
        holds.end_all()  # what is still to be digested is left undone
        maker.settle()
    return wrapped(*args, **kwargs)


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
