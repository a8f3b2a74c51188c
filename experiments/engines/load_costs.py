"""Time to first token of a like pair with instruments, beside one without, by turns.

The pair whose turn it is not is stopped by a signal: its threads, NIXL's among them, which never
sleep, take nothing of the cores then.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from kvpatch.verify.engine import Engine
from kvpatch.verify.handoff import prefill_then_decode

PROMPT_TOKENS = 900
WARM_UP = 70
"""Turns that are not counted; the witness learns from them."""

_WAKING_TOKENS = 64
"""Of a request that is not timed, after which caches and threads are what they are at work."""

_ANSWER_TOKENS = 2
_DRAWINGS = 2000


@dataclass(frozen=True)
class Row:
    """One instrument.

    Attributes:
        ratio: of its times to the others', the median over turns.
        low, high: the interval that holds it in 95 of 100 drawings of turns.
        without_ms, with_ms: medians.
        of_starts: the ratio of each start of the engines, whose places in memory differ.
    """

    what: str
    dtype: str
    model: str
    turns: int
    ratio: float
    low: float
    high: float
    without_ms: float
    with_ms: float
    of_starts: Sequence[float]
    stage: str = "cost"


Pair = tuple[Engine, Engine]


async def measure(
    client: httpx.AsyncClient,
    pairs: tuple[Pair, Pair],
    words: Sequence[int],
    turns: int,
    advance: Callable[[], None],
) -> list[tuple[float, float]]:
    """(without, with) seconds to the first token, of P and D together, by turn.

    Both pairs are asked the same, and neither has been asked it before.
    """
    chance = random.Random(31)

    async def one(pair: Pair, tokens: tuple[int, ...]) -> float:
        prefill, decode = pair
        urls, model = (prefill.url, decode.url), prefill.spec.model
        name = f"proof{uuid.uuid4().hex}"
        answer = await prefill_then_decode(client, *urls, model, tokens, _ANSWER_TOKENS, name)
        return answer.first_token_s

    found = []
    for turn in range(WARM_UP + turns):
        waking, timed = (
            tuple(chance.choices(words, k=tokens)) for tokens in (_WAKING_TOKENS, PROMPT_TOKENS)
        )
        seconds: dict[int, float] = {}
        for number in chance.sample((0, 1), 2):
            with _at_rest(pairs[1 - number]):
                await one(pairs[number], waking)
                seconds[number] = await one(pairs[number], timed)
        if turn >= WARM_UP:
            found.append((seconds[0], seconds[1]))
        advance()
    return found


@contextmanager
def _at_rest(pair: Pair) -> Iterator[None]:
    """Nothing of the pair runs meanwhile."""
    groups = [engine.group for engine in pair if engine.group is not None]
    try:
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)


def row_of(
    what: str, dtype: str, model: str, starts: Sequence[Sequence[tuple[float, float]]]
) -> Row:
    """The ratio over all turns of all starts, and how sure it is."""
    of_starts = [[with_it / without for without, with_it in found] for found in starts]
    ratios = [ratio for its in of_starts for ratio in its]
    chance = random.Random(5)
    drawn = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_DRAWINGS)
    )
    without, with_it = (
        1e3 * statistics.median(side)
        for side in zip(*(turn for found in starts for turn in found), strict=True)
    )
    return Row(
        *(what, dtype, model, len(ratios), statistics.median(ratios)),
        *(drawn[int(0.025 * _DRAWINGS)], drawn[int(0.975 * _DRAWINGS)], without, with_it),
        [statistics.median(its) for its in of_starts],
    )
