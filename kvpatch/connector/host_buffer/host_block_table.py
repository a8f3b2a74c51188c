"""Which slot of the host pool holds which block of the device: the scheduler's books.

Pure: the worker copies what :meth:`SlotTable.save` returns, in the order of the steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpatch.core.errors import NeverFits, NotReserved, NotSaved


@dataclass
class _Request:
    """What one request has.

    Attributes:
        reserved: slots that it may hold.
        held: the slot of each of its blocks.
        published: blocks whose slot has been told to somebody who may read it.
        outlived: published slots whose block has been written and saved again.
        is_short: whether there were no slots for some of its blocks.
    """

    reserved: int
    held: dict[int, int] = field(default_factory=dict)
    published: set[int] = field(default_factory=set)
    outlived: set[int] = field(default_factory=set)
    is_short: bool = False


class SlotTable:
    """Slots reserved in the order of asking, held while published, kept until taken again.

    A request reserves a slot for each of its blocks before it runs, shared blocks
    counted for each of their requests. Whoever has reserved therefore always finds its
    slots, and waits for nobody while it holds them.

    A slot that nobody holds keeps its content until it is taken again, the one unused
    for longest first, or until its block is written.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"expected a slot or more, found {slots}")
        self._slots = slots
        self._requests: dict[str, _Request] = {}
        self._queue: OrderedDict[str, int] = OrderedDict()
        self._reserved = 0
        self._slot_of: dict[int, int] = {}
        self._block_in: list[int | None] = [None] * slots
        self._holders: list[set[str]] = [set() for _ in range(slots)]
        # Held by nobody; whoever is first is taken first.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(slots))

    @property
    def slots(self) -> int:
        """How many there are."""
        return self._slots

    @property
    def free(self) -> int:
        """Slots that nobody has reserved."""
        return self._slots - self._reserved

    @property
    def reserved(self) -> int:
        """Slots that requests have reserved, filled or not."""
        return self._reserved

    @property
    def waiting(self) -> int:
        """Requests that have asked and must ask again."""
        return len(self._queue)

    @property
    def held(self) -> int:
        """Slots whose content a request holds."""
        return self._slots - len(self._idle)

    def reserve(self, request_id: str, blocks: int) -> bool:
        """Reserves slots for all blocks of a request; False where it has to ask again.

        Whoever asked before comes before. One that has its slots may ask as often as it
        likes, and gets no others, be it for another prompt under the same id; one that waits
        and never asks again must be released.

        Raises:
            NeverFits: there are not so many slots.
        """
        if request_id in self._requests:
            return True
        if blocks > self._slots:
            self._queue.pop(request_id, None)
            raise NeverFits(request_id, blocks, self._slots)
        self._queue[request_id] = blocks
        if next(iter(self._queue)) != request_id or blocks > self.free:
            return False
        del self._queue[request_id]
        self._reserved += blocks
        self._requests[request_id] = _Request(blocks)
        return True

    def written(self, blocks: Iterable[int], *, but_held_by: str | None = None) -> None:
        """Forgets what slots hold of blocks that are about to get new content.

        A slot that was published stays held, as it was published.

        Args:
            but_held_by: a request that has all that it will publish, and holds it as it is.
        """
        for block in blocks:
            slot = self._slot_of.pop(block, None)
            if slot is None:
                continue
            self._block_in[slot] = None
            for request_id in tuple(self._holders[slot]):
                request = self._requests[request_id]
                if request_id != but_held_by and block not in request.published:
                    del request.held[block]
                    self._let_go(request_id, slot)
            if slot in self._idle:
                self._idle.move_to_end(slot, last=False)

    def save(self, request_id: str, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """Gives a request a slot for each of these blocks.

        Returns:
            (device block, slot) of what has to be copied now. Blocks whose slot still
            holds them are not among them.

        Raises:
            NotReserved: the request has not reserved so many slots: none is given, and it
                publishes nothing more.
        """
        request = self._requests.get(request_id)
        wanted = list(dict.fromkeys(blocks))
        if request is None:
            raise NotReserved(f"request {request_id} has reserved no slots of the host buffer")
        wanted = [b for b in wanted if self._slot_of.get(b, -1) != request.held.get(b, -2)]
        again = [block for block in wanted if block in request.held]
        needed = len(request.held) + len(request.outlived) + len(wanted)
        if needed > request.reserved:
            request.is_short = True
            raise NotReserved(
                f"request {request_id} has reserved {request.reserved} slots of the host buffer "
                f"and needs {needed}"
            )
        for block in again:
            request.outlived.add(request.held.pop(block))
            request.published.discard(block)
        # Those that are there first: taking a slot may forget what an idle one holds.
        missing = []
        for block in wanted:
            slot = self._slot_of.get(block)
            if slot is None:
                missing.append(block)
            else:
                self._hold(request_id, request, block, slot)
        # Neighbours together, so that they are copied in one piece.
        taken = sorted(self._take() for _ in missing)
        for block, slot in zip(missing, taken, strict=True):
            self._slot_of[block] = slot
            self._block_in[slot] = block
            self._hold(request_id, request, block, slot)
        return list(zip(missing, taken, strict=True))

    def slots_of(self, request_id: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """The slots to publish; they keep their content until the request is released.

        Raises:
            NotSaved: a block is in none of the request's slots.
        """
        request = self._requests.get(request_id)
        if request is not None and request.is_short:
            raise NotSaved(
                f"request {request_id} has more blocks than the {request.reserved} slots of the "
                "host buffer that it reserved"
            )
        held = request.held if request is not None else {}
        missing = [block for block in blocks if block not in held]
        if request is None or missing:
            raise NotSaved(
                f"request {request_id}: {len(missing)} of {len(blocks)} blocks are in no slot of "
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
        self._reserved -= request.reserved
        # The end of a prompt goes first: others may share its beginning.
        for slot in (*request.outlived, *reversed(request.held.values())):
            self._let_go(request_id, slot)

    def _hold(self, request_id: str, request: _Request, block: int, slot: int) -> None:
        request.held[block] = slot
        self._holders[slot].add(request_id)
        self._idle.pop(slot, None)

    def _let_go(self, request_id: str, slot: int) -> None:
        self._holders[slot].discard(request_id)
        if not self._holders[slot]:
            self._idle[slot] = None
            if self._block_in[slot] is None:
                self._idle.move_to_end(slot, last=False)

    def _take(self) -> int:
        """The slot that has been idle for longest; reservations see to it that there is one."""
        slot, _ = self._idle.popitem(last=False)
        block = self._block_in[slot]
        if block is not None:
            del self._slot_of[block]
            self._block_in[slot] = None
        return slot
