"""Wrong bytes in D's cache, put there between a read's last byte and whoever looks at it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .compare import flip_last_bit

if TYPE_CHECKING:
    from .player import Player
    from .scheduler import Tracked

_SECONDS = 10.0
_POLL_SECONDS = 0.001
_FOR_EVER = 1e9


def flip(player: Player, tracked: Tracked) -> None:
    """One bit of the last layer's first token of the last block."""
    *_, last = player._elements(tracked, range(tracked.tokens))
    flip_last_bit(last)


def swap(player: Player, tracked: Tracked) -> None:
    """A request's first two blocks, in each layer."""
    first, second = tracked.tables[0][:2]
    for caches in player.caches:
        for layer in caches.layers:
            for plane in layer.planes:
                plane[[first, second]] = plane[[second, first]]


def layer(player: Player, tracked: Tracked) -> None:
    """The last layer's blocks hold the first one's."""
    blocks = tracked.tables[0]
    for caches in player.caches:
        pairs = zip(caches.layers[0].planes, caches.layers[-1].planes, strict=True)
        for of, into in pairs:
            into[blocks] = of[blocks]


FAULTS: dict[str, Callable[[Any, Any], None]] = {"flip": flip, "swap": swap, "layer": layer}


class DigestFaults:
    """What goes wrong behind a player's reads, and what its digests say of it."""

    def __init__(self, player: Player) -> None:
        self._player = player

    def after_reads(self, reads: int, fault: Callable[[], None]) -> None:
        """Has a fault happen once P has said of so many reads that it held the blocks.

        None of them goes on before.
        """
        from kvpatch.checks import hold_check
        from kvpatch.checks.hold_check import HoldCheck

        # On a busy machine P would be asked in front of a read as well.
        kept, hold_check._ASK_AGAIN_SECONDS = hold_check._ASK_AGAIN_SECONDS, _FOR_EVER
        answer, ready = HoldCheck.answer, set()
        # Each rank has a thread that asks: none may find all ready before the fault is there.
        one_at_a_time, happened = threading.Lock(), False

        def answered(check: Any, nixl: Any) -> bool | None:
            nonlocal happened
            found = answer(check, nixl)
            if not found:
                return found
            with one_at_a_time:
                ready.add(check)
                if len(ready) >= reads and not happened:
                    fault()
                    happened = True
                    hold_check._ASK_AGAIN_SECONDS = kept
                return found if happened else None

        HoldCheck.answer = answered  # type: ignore[method-assign]

    def ask_first(self, asks: bool) -> None:
        """Has every read ask for P's word before it begins, or those alone that have waited."""
        from kvpatch.checks import hold_check

        hold_check._ASK_AGAIN_SECONDS = -_FOR_EVER if asks else 1.0

    def stop_before_word(self, pid: int) -> None:
        """Has P's process stopped once, when all of a read has come and P's word has not."""
        from kvpatch.checks.hold_check import HoldCheck

        answer = HoldCheck.answer

        def answered(check: Any, nixl: Any) -> bool | None:
            HoldCheck.answer = answer  # type: ignore[method-assign]
            os.kill(pid, signal.SIGSTOP)
            return answer(check, nixl)

        HoldCheck.answer = answered  # type: ignore[method-assign]

    def counts(self) -> dict[str, int]:
        """Loads by what digests have said of them, over all of a D's ranks, since it began.

        What else they would have told their front end of meanwhile is lost.
        """
        from kvpatch.observe.catalogue import DIGESTS, Proof
        from kvpatch.worker.state import worker_state

        # Kept on the worker: the process plays other engines before and after.
        workers = self._player._inner_workers()
        counted = vars(workers[0]).setdefault("lab_counted", Counter())
        for worker in workers:
            for sample in worker_state(worker).book.take():
                if sample.name == DIGESTS.name:
                    counted[sample.label] += int(sample.value)
        return {proof.value: counted[proof.value] for proof in Proof}

    def made(self, name: str) -> str:
        """Waits until each of P's ranks has written something down of a request it holds.

        Raises:
            TimeoutError: one has not.
        """
        workers = self._player._inner_workers()
        words = [self._word(worker, name) for worker in workers]
        end = time.monotonic() + _SECONDS
        while not all(word >> 1 == generation >> 1 for word, generation in words):
            if time.monotonic() > end:
                raise TimeoutError(f"no digest of {name}: {words}")
            time.sleep(_POLL_SECONDS)
            words = [self._word(worker, name) for worker in workers]
        return "none" if any(word & 1 for word, _ in words) else "made"

    def _word(self, worker: Any, name: str) -> tuple[int, int]:
        """What the directory of digests has in a request's place, and the word of its hold."""
        from kvpatch.checks.digest_check import DigestTable, entry_address
        from kvpatch.worker.state import worker_state

        table = worker_state(worker).held(DigestTable)
        assert table is not None
        self.note_holds()
        generation = _seen[name]
        at = entry_address(0, generation) // 8
        return int(np.asarray(table._words)[at]), generation

    def note_holds(self) -> None:
        """Keeps in mind which words stand."""
        from kvpatch.checks.tables import HoldTable
        from kvpatch.worker.state import worker_state

        for worker in self._player._inner_workers():
            holds = worker_state(worker).held(HoldTable)
            assert holds is not None
            _seen.update(holds._held)

    def keep_from(self, are_kept: bool) -> None:
        """Keeps P's thread of digests from its next one, or lets it go on."""
        from kvpatch.checks.worker_digests import DigestMaker

        if are_kept:
            _make.append(DigestMaker._make)
            DigestMaker._make = _wait  # type: ignore[method-assign]
        else:
            DigestMaker._make = _make.pop()  # type: ignore[method-assign]


#: By request, the word that this process's P has held for it.
_seen: dict[str, int] = {}
_make: list[Any] = []


def _wait(self: Any, order: Any, came: float) -> None:
    kept = time.monotonic()
    while _make:
        time.sleep(_POLL_SECONDS)
    self._make(order, came + time.monotonic() - kept)
