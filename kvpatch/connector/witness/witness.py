"""A worker's witness: it takes the last tokens' slots before the model runs, and compares after."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.metrics.book import Book
from kvpatch.connector.state import worker_state
from kvpatch.connector.witness.calibration import (
    ENFORCE_MARGIN,
    LOG_MARGIN,
    Calibration,
    Distances,
    Excess,
)
from kvpatch.connector.witness.counts import Alarm, WitnessCounts
from kvpatch.connector.witness.enforcement import why_not_enforced
from kvpatch.connector.witness.lens import Lens, lens_of
from kvpatch.connector.witness.loads import Load, loads_in
from kvpatch.core.errors import (
    RegistrationRefused,
    UnexpectedCaches,
    UnreadableGeometry,
    WitnessRefused,
)
from kvpatch.core.text import one_line
from kvpatch.geometry.segments import Int64Array
from kvpatch.transfer.slot_copies import PendingDistances, TakenSlots

_LOG = logging.getLogger("kvpatch.witness")

#: Peers whose loads are learnt from; the one that was heard of least lately is forgotten.
_KEPT_PEERS = 64
#: Steps whose distances a device has not worked out.
_KEPT_STEPS = 256
_NO_DEVICE = "the device did not come to it"
_NO_MEMORY = "there was no memory for it"
_TOO_MANY = "too many ended in one step"
#: Of a device that has none left; the engine goes on.
_ERRORS = (RuntimeError, MemoryError)


class _Step(NamedTuple):
    """The loads of a step, and how far each is from what D computes."""

    lens: Lens
    loads: list[Load]
    distances: PendingDistances


class Witness:
    """Of one worker.

    Args:
        book: the worker's.
        lens: what it sees the cache through; a reason where it sees nothing.
        is_enforced: whether the scheduler is told of alarms, as of blocks that were not loaded.
    """

    def __init__(self, book: Book, lens: Lens | str, *, is_enforced: bool = False) -> None:
        self.counts = WitnessCounts(book)
        self._lens = lens
        self._is_enforced = is_enforced
        self._peers: dict[str, Calibration] = {}
        self._taken: tuple[Lens, list[Load], TakenSlots] | None = None
        self._pending: deque[_Step] = deque()
        self._invalid: set[int] = set()

    def look_through(self, lens: Lens | str) -> None:
        """Takes what its worker has registered anew; what was learnt of the same planes stays."""
        if _shape(lens) != _shape(self._lens):
            self._peers.clear()
        self._lens, self._taken = lens, None

    @property
    def waits_for_device(self) -> bool:
        """Whether a device has not said yet what it has compared."""
        return bool(self._pending)

    @property
    def has_taken(self) -> bool:
        """Whether there is something to compare once the model has run."""
        return self._taken is not None

    @property
    def has_invalid_blocks(self) -> bool:
        """Whether a step's load was bad, and is to be taken back."""
        return bool(self._invalid)

    def before(self, metadata: Any) -> None:
        """Takes what P has sent of the tokens that the model is about to compute."""
        if self._pending:
            self._hear()
        loads = loads_in(metadata)
        if not loads:
            return
        lens, seen, starts = self._lens, [], []
        for load in loads:
            found = load.cause or (lens if isinstance(lens, str) else lens.starts(load))
            if isinstance(found, str):
                self.counts.leave_out(found)
            else:
                seen.append(load)
                starts.append(found)
        if seen and isinstance(lens, Lens):
            self._take(lens, seen, starts)

    def _take(self, lens: Lens, loads: list[Load], starts: list[Int64Array]) -> None:
        """Takes the slots of as many of a step's loads as there is room for."""
        most = lens.copies.most_slots
        if len(loads) > most:
            self.counts.leave_out(_TOO_MANY, len(loads) - most)
        try:
            self._taken = lens, loads[:most], lens.copies.take(starts[:most])
        except _ERRORS:
            self._leave_out(loads[:most])

    def after(self) -> None:
        """Compares it with what the model has computed."""
        if self._taken is None:
            return
        (lens, loads, slots), self._taken = self._taken, None
        try:
            self._pending.append(_Step(lens, loads, slots.compare()))
        except _ERRORS:
            self._leave_out(loads)
        if len(self._pending) > _KEPT_STEPS:
            self.counts.leave_out(_NO_DEVICE, len(self._pending.popleft().loads))
        self._hear(wait=self._is_enforced)

    def take_invalid_blocks(self) -> set[int]:
        """The blocks of the step's bad loads, once."""
        found, self._invalid = self._invalid, set()
        return found

    def _leave_out(self, loads: list[Load]) -> None:
        """Counts loads for which the device has no memory, as the error that is handled says."""
        is_first = _NO_MEMORY not in self.counts.not_witnessed
        self.counts.leave_out(_NO_MEMORY, len(loads))
        level = logging.WARNING if is_first else logging.DEBUG
        _LOG.log(level, "loads are not witnessed: no memory to look at them", exc_info=True)

    def _hear(self, *, wait: bool = False) -> None:
        """Judges the loads of those steps that the device is done with."""
        while self._pending and (wait or self._pending[0].distances.is_ready()):
            step = self._pending.popleft()
            for load, distances in zip(step.loads, step.distances.read(), strict=True):
                self._judge(step.lens, load, distances)

    def _judge(self, lens: Lens, load: Load, distances: Distances) -> None:
        peer = self._calibration(lens, load.engine_id)
        if peer.limits is None:
            self.counts.learn()
            if peer.learn(distances):
                _LOG.info("%s", _calibrated(load.engine_id, peer))
            return
        excess = peer.excess(distances, LOG_MARGIN)
        _LOG.debug("request %s: a distance of %.3g", one_line(load.request_id), distances.max())
        if excess is None:
            self.counts.pass_one()
            return
        alarm = _alarm(lens, load, excess)
        self.counts.sound(alarm)
        is_told = self._is_enforced and peer.excess(distances, ENFORCE_MARGIN) is not None
        if is_told:
            self.counts.enforced += 1
            self._invalid |= set(load.blocks)
        told = "; its load is reported as failed" if is_told else ""
        _LOG.warning("%s%s", one_line(str(alarm)), told)

    def _calibration(self, lens: Lens, engine_id: str) -> Calibration:
        found = self._peers.pop(engine_id, None)
        if found is None:
            found = Calibration(len(lens.planes.planes), lens.floor)
            if len(self._peers) >= _KEPT_PEERS:
                del self._peers[next(iter(self._peers))]
        self._peers[engine_id] = found  # behind all that were heard of before
        return found


def set_up(release: ReleaseWorker, kv_caches: Mapping[str, Any], wish: str) -> None:
    """Gives a worker its witness, where one is asked for, of the tensors that it registers.

    Args:
        wish: ``off``, ``log`` or ``enforce``, as it was when vLLM's calls were replaced: by that
            somebody hands over the blocks of bad loads, or nobody does.
    """
    if wish == "off" or not release.pulls:
        return
    lens: Lens | str
    try:
        lens = lens_of(release, kv_caches)
    except (WitnessRefused, UnreadableGeometry, RegistrationRefused, UnexpectedCaches) as error:
        lens = str(error)
        _LOG.warning("no load is witnessed here: %s", lens)
    hindrance = why_not_enforced(release) if wish == "enforce" else "not asked for"
    if wish == "enforce" and hindrance:
        _LOG.warning("bad loads are logged, and not taken back: %s", hindrance)
    state = worker_state(release.worker)
    found = state.held(Witness)
    if found is None:
        state.hold(Witness(state.book, lens, is_enforced=not hindrance))
    else:
        found.look_through(lens)


def _shape(lens: Lens | str) -> object:
    """What distances are of."""
    if isinstance(lens, str):
        return None
    return [(plane.layer, plane.content) for plane in lens.copies.gather.planes]


def _alarm(lens: Lens, load: Load, excess: Excess) -> Alarm:
    planes = lens.copies.gather.planes
    plane = planes[excess.plane]
    # What the first layer holds depends on nothing but the token and its place.
    is_first = any(planes[number].layer == lens.planes.first_layer for number in excess.beyond)
    return Alarm(
        load.request_id,
        load.engine_id,
        plane.layer,
        plane.content.value,
        excess.distance,
        excess.threshold,
        "the last token itself" if is_first else "the context",
    )


def _calibrated(engine_id: str, peer: Calibration) -> str:
    if peer.limits is None:
        return f"loads from engine {engine_id} are still learnt from"
    low, high = (100 * LOG_MARGIN * float(f) for f in (peer.limits.min(), peer.limits.max()))
    return (
        f"calibrated by {peer.loads} loads from engine {engine_id}, {peer.left_out} of them left "
        f"out as too strange: a load is an alarm from {low:.2g} % to {high:.2g} % on, by layer"
    )
