"""A pair of engines, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvpatch.tools.planning.engine import PlannedEngine


class Outcome(Enum):
    """The outcome of requests that P computes and D takes over."""

    IDENTICAL = "identical"
    UNKNOWN = "not known"
    REFUSED = "refused at the first request"
    REFUSED_AT_START = "refused at start"
    WRONG = "wrong tokens, HTTP 200"


@dataclass(frozen=True)
class Verdict:
    """An outcome, the reason, what would help, and who reads: vLLM, kvpatch or neither."""

    outcome: Outcome
    reason: str = ""
    cure: str = ""
    way: str = "refused"


@dataclass(frozen=True)
class Pair:
    """P and D."""

    prefill: PlannedEngine
    decode: PlannedEngine

    @property
    def sides(self) -> tuple[PlannedEngine, PlannedEngine]:
        """P, then D."""
        return self.prefill, self.decode

    def ranks_met(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of P from which a rank of D reads."""
        theirs, ours = self.prefill.tp_size, self.decode.tp_size
        if theirs <= ours:
            return (rank * theirs // ours,)
        ratio = theirs // ours
        return tuple(range(rank * ratio, (rank + 1) * ratio))
