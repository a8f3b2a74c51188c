"""A clock around what instruments do for single loads, in an engine's process.

What an instrument adds to a load is microseconds, where two loads of one engine differ by
milliseconds: beside one another they cannot tell it, and a clock can. What takes its time in the
engine's steps is added up; of the answer that D waits for the whole wait counts, the steps that it
takes included. An engine has it with :class:`experiments.engines.proof_probe.ProofProbe`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HOLDS, WITNESS = "holds", "witness"


class Clock:
    """Seconds by instrument, of this process, until they are taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {HOLDS: 0.0, WITNESS: 0.0}

    def take(self) -> dict[str, float]:
        """What has been added up since the last time."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def start(self) -> None:
        """Sets it around both instruments' calls."""
        for instrument, calls in _calls().items():
            for owner, names in calls.items():
                for name in names:
                    setattr(owner, name, self._timed(instrument, getattr(owner, name)))
        from kvpatch.transfer.hold_check import HoldCheck

        HoldCheck.answer = self._waited_for(HoldCheck.answer)  # type: ignore[method-assign]

    def _timed(self, instrument: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[instrument] += time.perf_counter() - began

        return timed

    def _waited_for(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """From the first time that P is asked, which is once all bytes are there."""

        def answer(check: Any, nixl: Any) -> Any:
            began = vars(check).setdefault("_clocked", time.perf_counter())
            found = call(check, nixl)
            if found is not None:
                self.seconds[HOLDS] += time.perf_counter() - began
                del check._clocked
            return found

        return answer


def _calls() -> Mapping[str, Mapping[type, Sequence[str]]]:
    """What each does for single loads at P and at D; none of them calls another."""
    from kvpatch.connector.holds.granted import GrantedHolds
    from kvpatch.connector.witness.loads import ExpectedLoads
    from kvpatch.connector.witness.witness import Witness
    from kvpatch.transfer.hold_table import HoldTable

    return {
        HOLDS: {GrantedHolds: ("grant", "answer", "tell"), HoldTable: ("hold", "end")},
        WITNESS: {ExpectedLoads: ("expect", "tell"), Witness: ("before", "after")},
    }
