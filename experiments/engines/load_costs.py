"""What instruments cost of the time to a like pair's first token.

``measure``: beside a pair without them, by turns. The pair whose turn it is not is stopped by a
signal: its threads, NIXL's among them, which never sleep, take nothing of the cores then. Pairs
differ by percents from one start of the engines to the next, alike ones too.

``measure_switched``: within one pair, where an instrument looks at every other load, by chance. No
start of engines is in it, nor what an instrument does for every load before it looks at one: that,
too, is in what a clock says.

``measure_clocked``: by a clock around what instruments do for single loads, which tells
microseconds where the others tell percents (``clock.py``).

What they do whether or not there is a load is in ``bench_idle_step.py``.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from experiments.engines.clock import HOLDS, WITNESS
from experiments.engines.proof_probe import UNSEEN
from kvpatch.connector.holds.hold import FIELD as HOLD
from kvpatch.verify import handoff
from kvpatch.verify.engine import Engine

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


@dataclass(frozen=True)
class ClockedRow:
    """One instrument, by a clock around what it does for a load.

    Attributes:
        first_token_ms: the median over loads, of P and D together.
        of_p_ms, of_d_ms: the instrument's at either side, the mean over loads.
    """

    what: str
    dtype: str
    model: str
    loads: int
    first_token_ms: float
    of_p_ms: float
    of_d_ms: float
    stage: str = "clocked"

    @property
    def share(self) -> float:
        """Of the time to the first token."""
        return (self.of_p_ms + self.of_d_ms) / self.first_token_ms


@dataclass(frozen=True)
class Switch:
    """How one load is kept from an instrument.

    Attributes:
        setting: that has the instrument on, by its name in ``proof_pairs.COSTS``.
        unnamed: what is taken out of P's answer.
        begins: what the request's name begins with.
    """

    setting: str
    unnamed: str = ""
    begins: str = ""


SWITCHED = {
    # As of a P without kvpatch: D asks for no word, and waits for none.
    HOLDS: Switch("holds", unnamed=HOLD),
    WITNESS: Switch("holds and witness", begins=UNSEEN),
}
"""By instrument."""


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

    found = []
    for turn in range(WARM_UP + turns):
        waking, timed = (
            tuple(chance.choices(words, k=tokens)) for tokens in (_WAKING_TOKENS, PROMPT_TOKENS)
        )
        seconds: dict[int, float] = {}
        for number in chance.sample((0, 1), 2):
            with _at_rest(pairs[1 - number]):
                await _seconds(client, pairs[number], waking, None)
                seconds[number] = await _seconds(client, pairs[number], timed, None)
        if turn >= WARM_UP:
            found.append((seconds[0], seconds[1]))
        advance()
    return found


async def measure_switched(
    client: httpx.AsyncClient,
    pair: Pair,
    words: Sequence[int],
    switch: Switch,
    turns: int,
    advance: Callable[[], None],
) -> list[tuple[float, float]]:
    """As :func:`measure`; both loads of a turn are one pair's, of other prompts as long."""
    chance = random.Random(31)
    found = []
    for turn in range(WARM_UP + turns):
        seconds: dict[bool, float] = {}
        for is_on in chance.sample((False, True), 2):
            tokens = tuple(chance.choices(words, k=PROMPT_TOKENS))
            seconds[is_on] = await _seconds(client, pair, tokens, None if is_on else switch)
        if turn >= WARM_UP:
            found.append((seconds[False], seconds[True]))
        advance()
    return found


async def measure_clocked(
    client: httpx.AsyncClient,
    pair: Pair,
    words: Sequence[int],
    loads: int,
    advance: Callable[[], None],
) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds to the first token of each load, and by instrument of P and of D, of all."""
    chance, found = random.Random(31), []
    for load in range(WARM_UP + loads):
        if load == WARM_UP:
            for engine in pair:
                await engine.rpc(client, "kvpatch_clocked")
        tokens = tuple(chance.choices(words, k=PROMPT_TOKENS))
        seconds = await _seconds(client, pair, tokens, None)
        if load >= WARM_UP:
            found.append(seconds)
        advance()
    sums = [(await engine.rpc(client, "kvpatch_clocked"))[0] for engine in pair]
    return found, sums


def clocked_rows(
    dtype: str, model: str, seconds: Sequence[float], sums: Sequence[Mapping[str, float]]
) -> list[ClockedRow]:
    """A row for each instrument."""
    loads, first_ms = len(seconds), 1e3 * statistics.median(seconds)
    found = []
    for what in (HOLDS, WITNESS):
        of_p_ms, of_d_ms = (1e3 * side[what] / loads for side in sums)
        found.append(ClockedRow(what, dtype, model, loads, first_ms, of_p_ms, of_d_ms))
    return found


async def _seconds(
    client: httpx.AsyncClient, pair: Pair, tokens: tuple[int, ...], switch: Switch | None
) -> float:
    """To the first token, of P and D together; with a switch the instrument sees nothing of it."""
    prefill, decode = pair
    begins = "" if switch is None else switch.begins
    name = f"{begins}proof{uuid.uuid4().hex}"
    request = handoff.Request(prefill.spec.model, tokens, name)
    started = time.perf_counter()
    params = await handoff.prefill(client, prefill.url, request)
    if switch is not None and switch.unnamed:
        del params[switch.unnamed]
    between = time.perf_counter() - started
    answer = await handoff.decode(client, decode.url, request, _ANSWER_TOKENS, params)
    return between + answer.first_token_s


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
    what: str,
    dtype: str,
    model: str,
    starts: Sequence[Sequence[tuple[float, float]]],
    stage: str = "cost",
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
        stage,
    )
