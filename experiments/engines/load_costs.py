"""Time to first token of a like pair with instruments, beside one without, by turns."""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from kvpatch.verify.engine import Engine
from kvpatch.verify.handoff import prefill_then_decode

PROMPT_TOKENS = 900
WARM_UP = 70
"""Turns that are not counted; the witness learns from them."""

_ANSWER_TOKENS = 2
_DRAWINGS = 2000


@dataclass(frozen=True)
class Row:
    """One instrument.

    Attributes:
        ratio: of its times to the others', the median over turns.
        low, high: the interval that holds it in 95 of 100 drawings of turns.
        without_ms, with_ms: medians.
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
    stage: str = "cost"


Pair = tuple[Engine, Engine]


async def measure(
    client: httpx.AsyncClient,
    pairs: tuple[Pair, Pair],
    words: Sequence[int],
    turns: int,
    advance: Callable[[], None],
) -> list[tuple[float, float]]:
    """(without, with) seconds to the first token, of P and D together, by turn."""
    chance = random.Random(31)

    async def one(pair: Pair) -> float:
        prefill, decode = pair
        tokens = tuple(chance.choices(words, k=PROMPT_TOKENS))
        urls, model = (prefill.url, decode.url), prefill.spec.model
        name = f"proof{uuid.uuid4().hex}"
        answer = await prefill_then_decode(client, *urls, model, tokens, _ANSWER_TOKENS, name)
        return answer.first_token_s

    found = []
    for turn in range(WARM_UP + turns):
        order = chance.sample((0, 1), 2)
        seconds = {number: await one(pairs[number]) for number in order}
        if turn >= WARM_UP:
            found.append((seconds[0], seconds[1]))
        advance()
    return found


def row_of(what: str, dtype: str, model: str, found: Sequence[tuple[float, float]]) -> Row:
    """The ratio, and how sure it is."""
    ratios = [with_it / without for without, with_it in found]
    chance = random.Random(5)
    drawn = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_DRAWINGS)
    )
    without, with_it = (1e3 * statistics.median(side) for side in zip(*found, strict=True))
    return Row(
        *(what, dtype, model, len(ratios), statistics.median(ratios)),
        *(drawn[int(0.025 * _DRAWINGS)], drawn[int(0.975 * _DRAWINGS)], without, with_it),
    )
