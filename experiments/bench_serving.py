"""Measures time to first token of heterogeneous pairs of real engines, beside stock's like pair.

    experiments/bench_serving.sh [--pairs 32-128,64-32] [--prompts 40] [--json FILE] [--check]

vLLM's servers on the CPU with a random Llama of 128 KiB of KV a token. Four engines run at once: a
pair, and a stock like pair, which get the same prompts by turns. All blocks of the caches have been
written to before. "idle": D serves nothing else. "busy": D decodes for four other clients.

"first token" is from sending the prompt to P to D's first token; "of D" the part after P's answer.
Ratios are of one prompt on both pairs. The answers of both must be the same. With --check the exit
status is 1 above 1.2 of the like pair's time (1.05 where both pairs are alike).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from experiments.engines.models import MAKERS
from experiments.engines.pairs import Side, Single, engine_of
from experiments.engines.routed import options_for
from experiments.harness import Goal, Published, chosen, conclude, console_of, options_of
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import Engine, Options
from kvpatch.tools.verify.handoff import Completion, Request, events, prefill_then_decode
from kvpatch.tools.verify.run import (
    progress_bar,
    require_kvpatch_as_asked,
    running,
    until_signal,
    vocabulary,
)

#: vLLM's, for which attention in torch is written.
_RELEASE = "0.32.0"
_CACHE_GIB = 1
_TOKEN_BYTES = 128 * 1024
_PROMPT_TOKENS = 600
_ANSWER_TOKENS = 4
_OTHERS = 4
_OTHERS_TOKENS = 800
#: Loads in a row while others are served, before it is the other pair's turn.
_LOADS = 4
_MOST, _MOST_ALIKE = 1.2, 1.05


@dataclass(frozen=True)
class Pair:
    """A pair that is compared with a stock like pair of ``like``'s engines."""

    name: str
    prefill: Side
    decode: Side
    like: Side = Side(64)

    @property
    def most(self) -> float:
        return _MOST_ALIKE if self.prefill == self.decode == self.like else _MOST


PAIRS = (
    Pair("like", Side(64), Side(64)),
    Pair("64-32", Side(64), Side(32)),
    Pair("32-128", Side(32), Side(128)),
    Pair("128-32", Side(128), Side(32)),
    Pair("nhd-hnd", Side(32, layout="NHD"), Side(32, layout="HND"), Side(32, layout="HND")),
)


@dataclass(frozen=True)
class Load:
    """One prompt on both pairs; seconds."""

    like_first_token_s: float
    like_of_d_s: float
    first_token_s: float
    of_d_s: float


@dataclass
class Measured:
    """One pair; ``tokens_per_s`` are of the other clients, on the like pair's D and on its own."""

    pair: str
    most: float
    idle: list[Load] = field(default_factory=list)
    busy: list[Load] = field(default_factory=list)
    like_tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


Both = tuple[Engine, Engine]
"""P and D, which serve together."""

Draw = Callable[[int], tuple[int, ...]]
"""Draws a prompt of so many tokens, which is sent to no engine twice."""


class Others:
    """Clients of a decode engine that have nothing to do with a prefill engine."""

    def __init__(self, client: httpx.AsyncClient, engine: Engine, draw: Draw) -> None:
        self._client, self._engine, self._draw = client, engine, draw
        self.tokens = 0
        self._started = [asyncio.Event() for _ in range(_OTHERS)]

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """While inside, each has an answer of its own going on."""
        tasks = [asyncio.create_task(self._ask(number)) for number in range(_OTHERS)]
        try:
            await asyncio.gather(*(event.wait() for event in self._started))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, number: int) -> None:
        while True:
            body = {
                "model": self._engine.spec.model,
                "prompt": list(self._draw(8)),
                "max_tokens": _OTHERS_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            url = f"{self._engine.url}/v1/completions"
            async with self._client.stream("POST", url, json=body, timeout=None) as response:
                response.raise_for_status()
                async for _ in events(response.aiter_lines()):
                    self.tokens += 1
                    self._started[number].set()


async def load(client: httpx.AsyncClient, engines: Both, prompt: tuple[int, ...]) -> Completion:
    prefill, decode = engines
    request = Request(prefill.spec.model, prompt, f"bench{uuid.uuid4().hex}")
    return await prefill_then_decode(client, prefill.url, decode.url, request, _ANSWER_TOKENS)


def compared(name: str, like: Completion, own: Completion) -> Load:
    """One load.

    Raises:
        EngineFailed: the answers differ.
    """
    if like.token_ids != own.token_ids:
        raise EngineFailed(f"{name}: expected the answer {like.token_ids}, found {own.token_ids}")
    return Load(
        like.first_token_s,
        like.first_token_s - like.prefilled_s,
        own.first_token_s,
        own.first_token_s - own.prefilled_s,
    )


async def idle_loads(
    client: httpx.AsyncClient, both: tuple[Both, Both], measured: Measured, draw: Draw
) -> None:
    """One prompt on each pair, the first of them by chance."""
    prompt, order = draw(_PROMPT_TOKENS), random.sample((0, 1), 2)
    found = {number: await load(client, both[number], prompt) for number in order}
    measured.idle.append(compared(measured.pair, found[0], found[1]))


async def busy_loads(
    client: httpx.AsyncClient, both: tuple[Both, Both], measured: Measured, draw: Draw
) -> None:
    """A few prompts on each pair, while its D serves others."""
    wanted = [draw(_PROMPT_TOKENS) for _ in range(_LOADS)]
    found: dict[int, list[Completion]] = {}
    for number in random.sample((0, 1), 2):
        others = Others(client, both[number][1], draw)
        async with others.served():
            before, started = others.tokens, time.perf_counter()
            found[number] = [await load(client, both[number], prompt) for prompt in wanted]
            rate = (others.tokens - before) / (time.perf_counter() - started)
        (measured.tokens_per_s if number else measured.like_tokens_per_s).append(rate)
    for like, own in zip(found[0], found[1], strict=True):
        measured.busy.append(compared(measured.pair, like, own))


async def measure(pair: Pair, count: int, options: Options, console: Console) -> Measured:
    # Those with a layout have attention in torch, which knows both.
    single = Single(model="much-kv", torch_attention=pair.like.layout is not None)
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB)}
    specs = [
        engine_of(f"{pair.name}-{name}", single, side, str(options.model), True, on, settings)
        for name, side, on in (
            ("like-prefill", pair.like, False),
            ("like-decode", pair.like, False),
            ("prefill", pair.prefill, True),
            ("decode", pair.decode, True),
        )
    ]
    measured = Measured(pair.name, pair.most)
    async with httpx.AsyncClient() as client, running(specs, client, options, console) as engines:
        await require_kvpatch_as_asked(client, engines)
        words, chance = await vocabulary(client, engines[0]), random.Random(0)
        both = (engines[0], engines[1]), (engines[2], engines[3])

        def draw(tokens: int) -> tuple[int, ...]:
            return tuple(chance.choices(words, k=tokens))

        touching = -(-(_CACHE_GIB * 1024**3) // (_PROMPT_TOKENS * _TOKEN_BYTES)) + 2
        with progress_bar(console) as progress:
            task = progress.add_task(f"{pair.name}: touching", total=touching)
            for _ in range(touching):
                prompt = draw(_PROMPT_TOKENS)
                for engines_of in both:
                    await load(client, engines_of, prompt)
                progress.advance(task)
            task = progress.add_task(f"{pair.name}: idle", total=count)
            while len(measured.idle) < count:
                await idle_loads(client, both, measured, draw)
                progress.advance(task)
            task = progress.add_task(f"{pair.name}: busy", total=count)
            while len(measured.busy) < count:
                await busy_loads(client, both, measured, draw)
                progress.advance(task, _LOADS)
    return measured


def ratios(loads: Sequence[Load], what: str) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile) of a pair's share of the like pair's time."""
    each = [getattr(one, what) / getattr(one, f"like_{what}") for one in loads]
    lower, middle, upper = statistics.quantiles(each, n=4)
    return middle, lower, upper


def goals(found: Sequence[Measured]) -> list[Goal]:
    return [
        Goal(f"{one.pair}, D {when}: first token", ratios(loads, "first_token_s")[0], one.most)
        for one in found
        for when, loads in (("idle", one.idle), ("busy", one.busy))
    ]


def table(found: Sequence[Measured]) -> Published:
    shown = []
    for one in found:
        for when, loads in (("idle", one.idle), ("busy", one.busy)):
            row = [one.pair, when, str(len(loads))]
            for what in ("first_token_s", "of_d_s"):
                row.append(f"{1e3 * statistics.median(getattr(load, what) for load in loads):.0f}")
                row.append("{:.2f} ({:.2f} to {:.2f})".format(*ratios(loads, what)))
            rates = map(statistics.median, (one.tokens_per_s, one.like_tokens_per_s))
            row.append("{:.0f} beside {:.0f}".format(*rates) if when == "busy" else "")
            shown.append(row)
    columns = ("pair", "D", "prompts", "first token, ms", "of the like pair's", "of D, ms",
               "of the like pair's", "others' tokens a second")  # fmt: skip
    return Published("serving", "experiments/bench_serving.sh", _RELEASE, columns, shown)


def main() -> None:
    options = options_of(
        __doc__,
        pairs=(None, "which, by commas; all by default"),
        prompts=(40, "of each pair, idle and busy"),
        work_dir=(None, "for models and logs; kept"),
    )
    console = console_of(140)
    with exit_statuses():
        names = chosen(options.pairs, [pair.name for pair in PAIRS], "--pairs")
        of_run = options_for(options.work_dir, "serving", console, MAKERS["much-kv"])
        found = [
            until_signal(measure(pair, options.prompts, of_run, console))
            for pair in PAIRS
            if pair.name in names
        ]
    conclude(found, goals(found), options, console, table(found))


if __name__ == "__main__":
    main()
