"""The host buffer in P's scheduler: which blocks go to it, and by which number D finds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from weakref import ReferenceType, ref

from kvpatch.core import settings
from kvpatch.core.errors import NeverFits, NotReserved, NotSaved, RegistrationRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import one_line
from kvpatch.host_buffer.host_block_table import HostBlockTable, PublishedGroup
from kvpatch.host_buffer.policy import NULL_BLOCKS, block_bytes_of, host_blocks_in, is_to_be_read
from kvpatch.load.read_request import are_grouped, groups
from kvpatch.observe.book import Book
from kvpatch.observe.catalogue import HOST_BLOCKS, HOST_WAITING
from kvpatch.worker.envelope import SAVES
from kvpatch.worker.kv_cache_groups import transferred_groups
from kvpatch.worker.unpatched_workers import require

_LOG = logging.getLogger("kvpatch.host_buffer")
#: In an answer's transfer parameters: why there is nothing to read.
REFUSED = "kvpatch_refused"
#: As often as vLLM says how many requests are running.
_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class StepSaves:
    """The copies that a step's workers make after the model ran.

    Attributes:
        blocks: blocks of the device.
        host_blocks: blocks of the buffer, one for each of `blocks`.
        buffer_blocks: how many blocks the scheduler believes the buffer to have.
        is_last: True if a prompt ends with this step, so that D may read after it.
    """

    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    buffer_blocks: int
    is_last: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.blocks, self.host_blocks, self.buffer_blocks, self.is_last)


def _unpickled(*values: Any) -> StepSaves:
    """Returns a step's saves; fails in a process where the patch is off.

    P's answers name host blocks, which only the patch knows.
    """
    require("host_buffer")
    return StepSaves(*values)


class UsageLog:
    """One line while host blocks are in use, at most every so many seconds, and one when none is.

    The last line is therefore true of an engine at rest.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next = clock() + _EVERY_SECONDS
        self._is_said = False

    def look(self, table: HostBlockTable) -> None:
        """Logs the use of host blocks. The caller calls it whenever they may have changed hands."""
        is_used = bool(table.reserved or table.waiting)
        if is_used:
            now = self._clock()
            if now < self._next:
                return
            self._next = now + _EVERY_SECONDS
        elif not self._is_said:
            return
        self._is_said = is_used
        _LOG.info(
            "host buffer: %d of %d blocks reserved, %d of them filled; %d requests wait for blocks",
            table.reserved,
            table.size,
            table.held,
            table.waiting,
        )


class HostBufferScheduler:
    """The host buffer as one connector's scheduler half sees it."""

    def __init__(self, facts: ReleaseFacts) -> None:
        self._facts = facts
        self._core: ReferenceType[Any] | None = None
        self._table: HostBlockTable | None = None
        self._host_blocks = 0
        self._block_bytes = 0
        self._is_used = False
        #: Why requests that are not over yet are not saved.
        self._refusals: dict[str, str] = {}
        #: Requests whose prompt is saved.
        self._saved: set[str] = set()
        self._groups: tuple[PublishedGroup, ...] = ()
        #: By block of the device, the hash of what was saved of it; None of one not full.
        self._saved_hashes: dict[int, Any] = {}
        self._usage = UsageLog()
        #: Of the connector's scheduler half.
        self.book = Book()

    @property
    def is_linked(self) -> bool:
        return self._core is not None

    @property
    def table(self) -> HostBlockTable:
        """Returns the table of which host block holds which block.

        Raises:
            RegistrationRefused: the engine's scheduler has not been seen.
        """
        if self._table is None:
            raise RegistrationRefused(
                "a request came before vLLM's own Scheduler was seen: the host buffer needs it to "
                "know when blocks are freed",
                "leave out --scheduler-cls, or set KVPATCH_HOST_BUFFER=never",
            )
        return self._table

    def link(self, core: Any, connector_scheduler: Any) -> None:
        """Learns the blocks and their sizes from vLLM's scheduler."""
        plan = core.kv_cache_config
        self._block_bytes = block_bytes_of(plan, self._facts)
        self._host_blocks = host_blocks_in(
            settings.host_buffer_bytes(), self._block_bytes, int(plan.num_blocks)
        )
        self._table = HostBlockTable(self._host_blocks - NULL_BLOCKS)
        found = transferred_groups(plan, self._facts)
        clips = self._facts.has_cache_groups and connector_scheduler._is_hma_required
        windows = connector_scheduler.blocks_per_sw if clips else [0] * len(found)
        full_only = self._facts.loads_whole_blocks_only
        self._groups = tuple(
            PublishedGroup(int(group.kv_cache_spec.block_size), int(window), full_only)
            for group, window in zip(found, windows, strict=True)
        )
        self._core = ref(core)

    def tell(self) -> None:
        table = self._table
        if table is None:
            return
        now = table.size, table.reserved, table.held
        for label, value in zip(HOST_BLOCKS.values, now, strict=True):
            self.book.show(HOST_BLOCKS, value, label)
        self.book.show(HOST_WAITING, table.waiting)

    # -- arrival -------------------------------------------------------------

    def admit(self, request: Any) -> bool:
        """True if there is room for a request that D will read; it has to wait otherwise.

        One that never fits loses its parameters: it is then a prompt like any other, its
        answer says why, and D, which is told of nothing to read, computes it as well.
        """
        blocks = sum(group.needed(int(request.num_prompt_tokens)) for group in self._groups)
        self._is_used = True
        try:
            return self.table.reserve(request.request_id, blocks)
        except NeverFits as error:
            self.book.refuse(error)
            there = self.table.size * self._block_bytes
            why = (
                f"request {request.request_id} needs {blocks * self._block_bytes} bytes of host "
                f"buffer ({blocks} blocks) and there are {there}: the decode engine computes it "
                "itself; set KVPATCH_HOST_BUFFER_BYTES to "
                f"{(blocks + NULL_BLOCKS) * self._block_bytes} or more"
            )
            _LOG.warning("%s", why)
            self._refusals[request.request_id] = why
            request.kv_transfer_params = None
            return True

    # -- each step -----------------------------------------------------------

    def plan(self, output: Any, metadata: Any) -> dict[str, Any]:
        """Returns what the workers copy after this step, for their message."""
        core = self._core() if self._core is not None else None
        if core is None or self._table is None or not self._is_used:
            return {}  # a decode engine, or a prefill engine before its first request
        for entry in metadata.reqs_to_recv.values():
            self._table.written(b for group in groups(entry.local_block_ids) for b in group if b)
        steps = [
            (core.requests[request_id], int(count), self._blocks_of(core, request_id))
            for request_id, count in (output.num_scheduled_tokens.items() if output else ())
        ]
        # All of them first: a request may hit a block that another one computes in this step.
        for request, _, tables in steps:
            held_by = request.request_id if self._is_saved(request) else None
            for group, blocks in zip(self._groups, tables, strict=True):
                self._table.written(
                    group.written(blocks, request.num_computed_tokens), but_held_by=held_by
                )
        pairs: list[tuple[int, int]] = []
        is_last = False
        for request, count, tables in steps:
            if not is_to_be_read(request) or self._is_saved(request):
                continue
            end = request.num_computed_tokens + count
            if end >= request.num_prompt_tokens:
                is_last = True
                self._saved.add(request.request_id)
            for group, blocks in zip(self._groups, tables, strict=True):
                ready = group.ready(blocks, end, request.num_prompt_tokens)
                self._forget_loaded(core, request.request_id, ready)
                try:
                    found = self._table.save(request.request_id, ready)
                except NotReserved as error:  # it is not published then
                    _LOG.error("%s", error)
                else:
                    self._saved_hashes |= {block: _hash_of(core, block) for block, _ in found}
                    pairs += found
        self._usage.look(self._table)
        if not pairs and not is_last:
            return {}
        blocks = tuple(block for block, _ in pairs)
        host_blocks = tuple(host_block + NULL_BLOCKS for _, host_block in pairs)
        return {SAVES: StepSaves(blocks, host_blocks, self._host_blocks, is_last)}

    def _is_saved(self, request: Any) -> bool:
        """True if earlier steps have saved the whole prompt: nothing more is saved or published.

        What follows writes on into the prompt's last block: an answer, drafts that may be rejected,
        and, <= 0.11.0, one token more by a scheduler that does not wait for a step's tokens. The
        answer may be out before that step is over.
        """
        if int(request.num_computed_tokens) < int(request.num_prompt_tokens):
            self._saved.discard(request.request_id)  # it is computed anew
        return request.request_id in self._saved

    def _forget_loaded(self, core: Any, request_id: str, blocks: Iterable[int]) -> None:
        """Forgets what host blocks hold of blocks that have got other content unseen.

        Of a MultiConnector's another one may have loaded it, which no step computes. What a
        request holds already is its own, and what is hit of others' has the hash that it had.
        """
        strange = self.table.not_held(request_id, blocks)
        found = ((block, _hash_of(core, block)) for block in strange)
        saved = self._saved_hashes
        self.table.written(b for b, now in found if now is None or saved.get(b) != now)

    def _blocks_of(self, core: Any, request_id: str) -> Sequence[Sequence[int]]:
        found: Sequence[Sequence[int]] = core.kv_cache_manager.get_block_ids(request_id)
        if self._facts.plans_transfers:
            found = core.kv_cache_config.select_transfer_block_ids(found)
        return found

    # -- the end -------------------------------------------------------------

    def _publish(self, request: Any, params: dict[str, Any]) -> None:
        """Gives D host blocks for a finished request's prompt; raises NotSaved if one has none."""
        core, blocks = self._core() if self._core is not None else None, params["remote_block_ids"]
        if not blocks or not any(groups(blocks)):
            return
        if core is None:
            raise NotSaved(f"request {request.request_id} outlives vLLM's scheduler")
        tokens, computed = int(request.num_prompt_tokens), int(request.num_computed_tokens)
        named = []
        tables = self._blocks_of(core, request.request_id)
        for group, table in zip(self._groups, tables, strict=True):
            wanted = group.published(table, tokens)
            if group.last_blocks and computed > tokens and not all(wanted):
                raise NotSaved(
                    f"request {request.request_id} has an answer of several tokens, behind which "
                    "its sliding window has left the prompt's last blocks: set max_tokens to 1 "
                    "where prompts are computed for another engine"
                )
            own = iter(self.table.host_blocks_of(request.request_id, [b for b in wanted if b]))
            # A window's list begins with null blocks.
            named.append([next(own) + NULL_BLOCKS if block else 0 for block in wanted])
        if not any(named):  # 0.10.0 publishes whole blocks alone
            raise NotSaved(f"request {request.request_id} has a prompt of no whole block")
        params["remote_block_ids"] = type(blocks)(named) if are_grouped(blocks) else named[0]
        if "remote_num_tokens" in params:
            params["remote_num_tokens"] = min(params["remote_num_tokens"], tokens)

    def finished(
        self, connector_scheduler: Any, request: Any, answer: tuple[bool, Any]
    ) -> tuple[bool, Any]:
        """The connector's answer to a finished request, with host blocks in place of blocks.

        One whose blocks were not saved is let go of at once, and nobody is told of it.
        """
        keeps_blocks, params = answer
        if not keeps_blocks or not params:
            self.release(request.request_id)
            return keeps_blocks, params or self._refusal(request.request_id)
        try:
            self._publish(request, params)
        except NotSaved as error:
            _LOG.error("request %s is not published: %s", one_line(request.request_id), error)
            connector_scheduler._reqs_need_send.pop(request.request_id, None)
            if self._facts.books_unprocessed:
                connector_scheduler._reqs_not_processed.add(request.request_id)
            self.release(request.request_id)
            return False, None
        return answer

    def _refusal(self, request_id: str) -> dict[str, Any] | None:
        """Returns P's answer, once, to a request that could never be saved; None for any other.

        A proxy that passes it on to a decode engine asks D for an ordinary answer: D loads nothing.
        """
        why = self._refusals.pop(request_id, None)
        if why is None:
            return None
        return {"do_remote_prefill": False, "do_remote_decode": False, REFUSED: why}

    def release(self, request_id: str) -> None:
        self._saved.discard(request_id)
        if self._table is not None:
            self._table.release(request_id)
            self._usage.look(self._table)


def _hash_of(core: Any, block: int) -> Any:
    """Returns the prefix cache's hash of a block's content; None where vLLM has none."""
    blocks = getattr(core.kv_cache_manager.block_pool, "blocks", None)  # kvcached's has none
    return None if blocks is None else blocks[block].block_hash
