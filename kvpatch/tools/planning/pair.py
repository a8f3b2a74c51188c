"""A pair of engines and a request: what outcomes are told of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvpatch.tools.planning.engine import PlannedEngine


class Outcome(Enum):
    """What becomes of requests that P computes and D takes over; the worst last."""

    IDENTICAL = "identical"
    REFUSED = "refused at the first request"
    REFUSED_AT_START = "refused at start"
    NOT_TOLD = "P is not told"
    CRASH = "crash"
    WRONG = "wrong tokens, HTTP 200"

    @property
    def badness(self) -> int:
        """For the worst of several."""
        return list(Outcome).index(self)


@dataclass(frozen=True)
class Verdict:
    """An outcome, and why.

    Attributes:
        cure: what would help; empty where nothing is wrong, or nothing known helps.
    """

    outcome: Outcome
    reason: str = ""
    cure: str = ""


@dataclass(frozen=True)
class Request:
    """A prompt.

    Attributes:
        cached: of its tokens, those that D's own prefix cache holds.
    """

    tokens: int
    cached: int = 0


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
        """Those of P from which a rank of D reads."""
        theirs, ours = self.prefill.tp_size, self.decode.tp_size
        if theirs <= ours:
            return (rank * theirs // ours,)
        ratio = theirs // ours
        return tuple(range(rank * ratio, (rank + 1) * ratio))

    def requests(self, tokens: int) -> tuple[Request, ...]:
        """Prompts by which a pair is judged: new ones, and with a prefix hit, of unlike lengths."""
        block = self.decode.block_tokens
        odd = max(tokens, 2 * block) // block * block + 1
        fresh = (Request(tokens), Request(odd))
        if not has_prefix_cache(self.decode):
            return fresh
        return (*fresh, Request(odd, block), Request(odd + block // 2, odd // block * block))


def has_prefix_cache(engine: PlannedEngine) -> bool:
    """Whether an engine keeps prompts for later ones."""
    options = engine.arguments
    if options.option("no_enable_prefix_caching") is True or engine.model.state_layers:
        return False
    return options.option("enable_prefix_caching") is not False
