"""The table of which host block holds which block, and which requests wait for room.

Pure: the worker copies what :meth:`HostBlockTable.save` returns, in the order of the steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpatch.core.errors import NeverFits, NotReserved, NotSaved


@dataclass(frozen=True)
class PublishedGroup:
    """How a cache group's blocks are published.

    Attributes:
        block_tokens: of one of the group's blocks.
        last_blocks: of a sliding window, how many of the last ones; 0 for all.
        full_blocks_only: whether a last, partly filled block is not published (0.10.0).
    """

    block_tokens: int
    last_blocks: int
    full_blocks_only: bool = False

    def needed(self, tokens: int) -> int:
        """Blocks that a prompt of so many tokens publishes."""
        first, stop = self._place_of(tokens)
        return stop - first

    def published(self, blocks: Sequence[int], tokens: int) -> Sequence[int]:
        """Returns those of a request's blocks that hold its prompt of so many tokens.

        What is behind them holds an answer, or drafts that may be rejected.
        """
        return blocks[slice(*self._place_of(tokens))]

    def _place_of(self, tokens: int) -> tuple[int, int]:
        rounded = tokens if self.full_blocks_only else tokens + self.block_tokens - 1
        stop = rounded // self.block_tokens
        return max(0, stop - self.last_blocks) if self.last_blocks else 0, stop

    def written(self, blocks: Sequence[int], start: int) -> list[int]:
        """Returns the blocks that a step writes, which computes tokens from `start` on."""
        return [block for block in blocks[start // self.block_tokens :] if block]

    def ready(self, blocks: Sequence[int], end: int, prompt_tokens: int) -> list[int]:
        """Returns the blocks whose content is final once the tokens before `end` are computed.

        Before the prompt's end a window's are left out: most of them will have slid out.
        """
        if end >= prompt_tokens:
            ready = self.published(blocks, prompt_tokens)
        else:
            ready = () if self.last_blocks else blocks[: end // self.block_tokens]
        return [block for block in ready if block]


@dataclass
class _Request:
    """The host blocks of one request.

    Attributes:
        reserved: host blocks that it may hold.
        held: the host block of each of its blocks.
        published: blocks whose host block a peer may read, because an answer named it.
        outlived: published host blocks whose block has been written and saved again.
        is_short: True if there were no host blocks for some of its blocks.
    """

    reserved: int
    held: dict[int, int] = field(default_factory=dict)
    published: set[int] = field(default_factory=set)
    outlived: set[int] = field(default_factory=set)
    is_short: bool = False


class HostBlockTable:
    """Host blocks reserved in the order of asking, held while published, kept until taken again.

    A request reserves a host block for each of its blocks before it runs, shared blocks
    counted for each of their requests. Whoever has reserved therefore always finds its
    host blocks, and waits for nobody while it holds them.

    A host block that nobody holds keeps its content until it is taken again, the one unused
    for longest first, or until its block is written.
    """

    def __init__(self, host_blocks: int) -> None:
        if host_blocks < 1:
            raise ValueError(f"expected a host block or more, found {host_blocks}")
        self.size = host_blocks
        #: Host blocks that requests have reserved, filled or not.
        self.reserved = 0
        self._requests: dict[str, _Request] = {}
        self._queue: OrderedDict[str, int] = OrderedDict()
        self._host_block_of: dict[int, int] = {}
        self._block_in: list[int | None] = [None] * host_blocks
        self._holders: list[set[str]] = [set() for _ in range(host_blocks)]
        # Held by nobody; whoever is first is taken first.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(host_blocks))

    @property
    def free(self) -> int:
        """Host blocks that nobody has reserved."""
        return self.size - self.reserved

    @property
    def waiting(self) -> int:
        """Requests that have asked and must ask again."""
        return len(self._queue)

    @property
    def held(self) -> int:
        """Host blocks whose content a request holds."""
        return self.size - len(self._idle)

    def reserve(self, request_id: str, blocks: int) -> bool:
        """Reserves host blocks for all blocks of a request; False where it has to ask again.

        Whoever asked before comes before. One that has its host blocks may ask as often as it
        likes, and gets no others, be it for another prompt under the same id; one that waits
        and never asks again must be released.

        Raises:
            NeverFits: there are not so many host blocks.
        """
        if request_id in self._requests:
            return True
        if blocks > self.size:
            self._queue.pop(request_id, None)
            raise NeverFits(request_id, blocks, self.size)
        self._queue[request_id] = blocks
        if next(iter(self._queue)) != request_id or blocks > self.free:
            return False
        del self._queue[request_id]
        self.reserved += blocks
        self._requests[request_id] = _Request(blocks)
        return True

    def written(self, blocks: Iterable[int], *, but_held_by: str | None = None) -> None:
        """Forgets what host blocks hold of blocks that are about to get new content.

        A host block that was published stays held, as it was published.

        Args:
            but_held_by: a request that has all that it will publish, and holds it as it is.
        """
        for block in blocks:
            host_block = self._host_block_of.pop(block, None)
            if host_block is None:
                continue
            self._block_in[host_block] = None
            for request_id in tuple(self._holders[host_block]):
                request = self._requests[request_id]
                if request_id != but_held_by and block not in request.published:
                    del request.held[block]
                    self._let_go(request_id, host_block)
            if host_block in self._idle:
                self._idle.move_to_end(host_block, last=False)

    def not_held(self, request_id: str, blocks: Iterable[int]) -> list[int]:
        request = self._requests.get(request_id)
        held = request.held if request is not None else {}
        return [block for block in blocks if block not in held]

    def save(self, request_id: str, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """Gives a request a host block for each of these blocks.

        Returns:
            (device block, host block) of what has to be copied now. Blocks whose host block still
            holds them are not among them.

        Raises:
            NotReserved: the request has not reserved so many host blocks: none is given, and it
                publishes nothing more.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise NotReserved(f"request {request_id} has reserved no blocks of the host buffer")
        wanted = list(dict.fromkeys(blocks))
        wanted = [b for b in wanted if self._host_block_of.get(b, -1) != request.held.get(b, -2)]
        again = [block for block in wanted if block in request.held]
        needed = len(request.held) + len(request.outlived) + len(wanted)
        if needed > request.reserved:
            request.is_short = True
            raise NotReserved(
                f"request {request_id} has reserved {request.reserved} blocks of the host buffer "
                f"and needs {needed}"
            )
        for block in again:
            request.outlived.add(request.held.pop(block))
            request.published.discard(block)
        # Those that are there first: taking a host block may forget what an idle one holds.
        missing = []
        for block in wanted:
            host_block = self._host_block_of.get(block)
            if host_block is None:
                missing.append(block)
            else:
                self._hold(request_id, request, block, host_block)
        # Neighbours together, so that they are copied in one piece.
        taken = sorted(self._take() for _ in missing)
        for block, host_block in zip(missing, taken, strict=True):
            self._host_block_of[block] = host_block
            self._block_in[host_block] = block
            self._hold(request_id, request, block, host_block)
        return list(zip(missing, taken, strict=True))

    def host_blocks_of(self, request_id: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """The host blocks to publish; they keep their content until the request is released.

        Raises:
            NotSaved: a block is in none of the request's host blocks.
        """
        request = self._requests.get(request_id)
        if request is not None and request.is_short:
            raise NotSaved(
                f"request {request_id} has more blocks than the {request.reserved} blocks of the "
                "host buffer that it reserved"
            )
        held = request.held if request is not None else {}
        missing = [block for block in blocks if block not in held]
        if request is None or missing:
            raise NotSaved(
                f"request {request_id}: {len(missing)} of {len(blocks)} blocks are in no block of "
                f"the host buffer: {missing[:5]}"
            )
        request.published.update(blocks)
        return tuple(held[block] for block in blocks)

    def release(self, request_id: str) -> None:
        """Takes back all that a request has: its place in the queue too."""
        self._queue.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.reserved -= request.reserved
        # The end of a prompt goes first: others may share its beginning.
        for host_block in (*request.outlived, *reversed(request.held.values())):
            self._let_go(request_id, host_block)

    def _hold(self, request_id: str, request: _Request, block: int, host_block: int) -> None:
        request.held[block] = host_block
        self._holders[host_block].add(request_id)
        self._idle.pop(host_block, None)

    def _let_go(self, request_id: str, host_block: int) -> None:
        self._holders[host_block].discard(request_id)
        if not self._holders[host_block]:
            self._idle[host_block] = None
            if self._block_in[host_block] is None:
                self._idle.move_to_end(host_block, last=False)

    def _take(self) -> int:
        """The one that has been idle for longest; reservations see to it that there is one."""
        host_block, _ = self._idle.popitem(last=False)
        block = self._block_in[host_block]
        if block is not None:
            del self._host_block_of[block]
            self._block_in[host_block] = None
        return host_block
