"""The stages of the proofs, each with engines of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from experiments import drill
from experiments.engines import fault_loads, good_loads, lease_loads, load_costs
from experiments.engines.prompt_tokens import Excerpts, PromptTokens, Words
from experiments.engines.proof_pairs import (
    BOTH,
    COSTS,
    NOTHING,
    PAIRS,
    Pair,
    Played,
    single,
)
from experiments.engines.references import Prompt
from experiments.engines.routed import Play, connections, references
from experiments.proof_shown import clocked_table, cost_table, fault_table, good_table, lease_table
from kvpatch.verify.running import progress_bar, require_kvpatch_as_asked, running, vocabulary
from kvpatch.verify.setups import Options, small_engine

STAGES = ("good", "faults", "lease", "cost", "switched", "clocked")
DTYPES = ("float32", "bfloat16")
_SEED = 14


@dataclass(frozen=True)
class Asking:
    """What one run plays.

    Attributes:
        loads: good ones of each pair and data type, and no more than ``seconds`` allow.
        each: loads of each fault.
        lengths: of prompts that faults come over.
        text: that their prompts, and those of good loads, are excerpts of.
    """

    stages: Sequence[str]
    pairs: Sequence[Pair]
    dtypes: Sequence[str]
    model: str
    model_name: str
    loads: int
    each: int
    seconds: float
    lengths: Sequence[tuple[int, int]]
    text: Excerpts | None = None


@dataclass(frozen=True)
class Run:
    """What all stages have in common; ``keep`` is told all rows whenever there are more."""

    asking: Asking
    options: Options
    console: Console
    keep: Callable[[Sequence[Any]], None]


def bar(progress: Progress, name: str, total: int) -> Any:
    """Advances a line of progress."""
    task = progress.add_task(name, total=total)
    return lambda: progress.advance(task)


@dataclass(frozen=True)
class Answers:
    """Prompts with the single engine's answers: of good loads, and by length for faults."""

    words: PromptTokens
    good: Sequence[good_loads.Asked]
    prompts: Sequence[Sequence[Prompt]]


async def single_answers(run: Run, client: httpx.AsyncClient, dtype: str) -> Answers:
    """All that the stages of one data type need."""
    asking = run.asking
    good: list[good_loads.Asked] = []
    prompts: list[list[Prompt]] = []
    spec = single(asking.model, dtype)
    async with running((spec,), client, run.options, run.console) as (alone,):
        words = asking.text or Words(sorted(set(await vocabulary(client, alone))))
        with progress_bar(run.console) as progress:
            if "good" in asking.stages:
                drawn = list(good_loads.prompts(words, asking.loads, _SEED))
                sampled = -(-len(drawn) // good_loads.SAMPLED_OF)
                advance = bar(progress, "answers to good loads", sampled)
                good = await good_loads.ask_single(client, alone, drawn, dtype, advance)
            if "faults" in asking.stages:
                each = -(-asking.each // len(asking.lengths))
                wanted = fault_loads.Wanted(asking.lengths, each, fault_loads.MARGINS[dtype])
                advance = bar(progress, "answers to faults' prompts", each * len(asking.lengths))
                prompts = await fault_loads.references(client, alone, words, wanted, advance)
    return Answers(words, good, prompts)


async def play_dtype(run: Run, dtype: str, rows: list[Any]) -> None:
    """Good loads and faults in one data type, pair after pair."""
    asking = run.asking
    async with connections() as client:
        answers = await single_answers(run, client, dtype)
        for pair in asking.pairs:
            its: list[Any] = []
            played = Played(pair, BOTH, asking.model, dtype)
            async with aclosing(play_pair(run, client, played, answers)) as found:
                async for more in found:
                    for row in more:
                        row.model = asking.model_name
                    its += more
                    run.keep([*rows, *its])  # an hour of them: none is lost
            rows += its
            run.console.print(good_table([row for row in its if row.stage == "good"]))
            run.console.print(fault_table([row for row in its if row.stage == "faults"]))


async def play_pair(
    run: Run, client: httpx.AsyncClient, played: Played, answers: Answers
) -> AsyncGenerator[Sequence[Any], None]:
    """Good loads and fault after fault with one pair; faults where D reads from one rank."""
    asking = run.asking
    specs = played.prefill(), played.decode()
    async with running(specs, client, run.options, run.console) as engines:
        await require_kvpatch_as_asked(client, engines)
        prefill, decode = engines
        with progress_bar(run.console) as progress:
            title = f"{played.pair.name}, {played.dtype}"
            if "good" in asking.stages:
                advance = bar(progress, f"{title}: good loads", len(answers.good))
                until = time.monotonic() + asking.seconds
                yield [
                    await good_loads.serve(client, played, engines, answers.good, advance, until)
                ]
            if played.pair.prefill_ranks == 1 and "faults" in asking.stages:
                faults = fault_loads.Faults(
                    client, played, prefill, decode, answers.words, answers.prompts, asking.lengths
                )
                await faults.begin()
                kinds = fault_loads.kinds()
                advance = bar(progress, f"{title}: faults", asking.each * len(kinds))
                for fault, moment in kinds:
                    yield await faults.all_of(fault, moment, asking.each, advance)


async def play_lease(run: Run) -> list[Any]:
    """Stale blocks of the drill's like pairs, in float32, with kvpatch on both sides and on D."""
    asking, rows = run.asking, list[Any]()
    size, options = drill.DECODE_CACHE_TOKENS, run.options
    small = ("--max-num-seqs", "16", "--num-gpu-blocks-override", str(size // 32))
    alone = small_engine("lease-single", asking.model, "float32", small, False, False)
    async with connections() as client:
        async with running((alone,), client, options, run.console) as (one,):
            words = sorted(set(await vocabulary(client, one)))
            with progress_bar(run.console) as progress:
                prompts = await references(client, one, words, asking.each, progress)
        for pair in (drill_pair for drill_pair in drill.PAIRS if drill_pair.name in _LEASE):
            setting, on = _LEASE[pair.name]
            specs = (
                drill.engine(pair, "prefill", asking.model, 32, drill.PREFILL_CACHE_TOKENS, "fail"),
                drill.engine(pair, "decode", asking.model, 32, size, "fail"),
            )
            specs = tuple(
                replace(spec, environment=(*spec.environment, *(on if spec.kvpatch else ())))
                for spec in specs
            )
            async with running(specs, client, options, run.console) as (prefill, decode):
                await require_kvpatch_as_asked(client, (prefill, decode))
                play = Play(client, options, prefill, decode, words)
                row = lease_loads.Row(setting, "float32", asking.model_name, len(prompts))
                with progress_bar(run.console) as progress:
                    advance = bar(progress, f"{setting}: stale loads", len(prompts))
                    rows.append(await lease_loads.serve(play, prompts, row, advance))
            run.console.print(lease_table(rows))
    return rows


_LEASE = {
    "both": ("both", (("KVPATCH_DIGEST", "all"), ("KVPATCH_WITNESS", "log"))),
    "d-alone": ("D alone", (("KVPATCH_WITNESS", "log"),)),
}


async def play_cost(run: Run, dtype: str) -> list[Any]:
    """Each instrument's, one after the other, beside a pair of stock's that is started with it."""
    asking, rows = run.asking, list[Any]()
    pair, *_ = [pair for pair in PAIRS if pair.is_like]
    plain = Played(pair, NOTHING, asking.model, dtype)
    for setting in COSTS:
        played = Played(pair, setting, asking.model, dtype)
        starts = [
            await _play_cost_once(run, plain, played, number % 2 == 1) for number in range(_STARTS)
        ]
        rows.append(load_costs.row_of(setting.name, dtype, asking.model_name, starts))
        run.console.print(cost_table(rows))
    return rows


async def _play_cost_once(
    run: Run, plain: Played, played: Played, is_plain_last: bool
) -> list[tuple[float, float]]:
    """(without, with) seconds by turn of one start of the engines."""
    specs = [(one.prefill(), one.decode()) for one in (plain, played)]
    order = (1, 0) if is_plain_last else (0, 1)
    in_order = [
        replace(spec, name=f"{number}-{spec.name}") for number in order for spec in specs[number]
    ]
    async with (
        connections() as client,
        running(in_order, client, run.options, run.console) as engines,
    ):
        await require_kvpatch_as_asked(client, engines)
        words = sorted(set(await vocabulary(client, engines[0])))
        started = (engines[0], engines[1]), (engines[2], engines[3])
        pairs = started[order[0]], started[order[1]]
        with progress_bar(run.console) as progress:
            turns = -(-run.asking.each // _STARTS)
            title = f"{played.setting.name}: turns"
            advance = bar(progress, title, load_costs.WARM_UP + turns)
            return await load_costs.measure(client, pairs, words, turns, advance)


async def play_switched(run: Run, dtype: str) -> list[Any]:
    """What is done for single loads, each instrument's in a pair of its own."""
    rows = list[Any]()
    for what, switch in load_costs.SWITCHED.items():
        async with _like_pair(run, switch.setting, dtype) as (client, pair, words):
            await pair[1].rpc(client, "kvpatch_look_away")
            with progress_bar(run.console) as progress:
                advance = bar(progress, f"{what}: turns", load_costs.WARM_UP + run.asking.each)
                found = await load_costs.measure_switched(
                    client, pair, words, switch, run.asking.each, advance
                )
        rows.append(load_costs.row_of(what, dtype, run.asking.model_name, [found], "switched"))
        run.console.print(cost_table(rows))
    return rows


async def play_clocked(run: Run, dtype: str) -> list[Any]:
    """Both instruments in one pair, by a clock."""
    async with _like_pair(run, "holds and witness", dtype) as (client, pair, words):
        for engine in pair:
            await engine.rpc(client, "kvpatch_clock")
        with progress_bar(run.console) as progress:
            advance = bar(progress, "clocked loads", load_costs.WARM_UP + run.asking.each)
            seconds, sums = await load_costs.measure_clocked(
                client, pair, words, run.asking.each, advance
            )
    rows = load_costs.clocked_rows(dtype, run.asking.model_name, seconds, sums)
    run.console.print(clocked_table(rows))
    return list(rows)


@asynccontextmanager
async def _like_pair(
    run: Run, setting_name: str, dtype: str
) -> AsyncIterator[tuple[httpx.AsyncClient, load_costs.Pair, list[int]]]:
    """(client, P and D, words of their vocabulary), of the like pair in one of :data:`COSTS`."""
    (setting,) = (one for one in COSTS if one.name == setting_name)
    like, *_ = [pair for pair in PAIRS if pair.is_like]
    played = Played(like, setting, run.asking.model, dtype)
    specs = played.prefill(), played.decode()
    async with (
        connections() as client,
        running(specs, client, run.options, run.console) as (prefill, decode),
    ):
        await require_kvpatch_as_asked(client, (prefill, decode))
        yield client, (prefill, decode), sorted(set(await vocabulary(client, prefill)))


_STARTS = 3
"""Of each pair's engines; turns are shared out over them."""


async def play(run: Run) -> list[Any]:
    """Stage after stage, data type after data type."""
    rows: list[Any] = []
    stages = run.asking.stages
    for dtype in run.asking.dtypes:
        if {"good", "faults"} & set(stages):
            await play_dtype(run, dtype, rows)
        if "cost" in stages:
            rows += await play_cost(run, dtype)
            run.keep(rows)
        if "switched" in stages:
            rows += await play_switched(run, dtype)
            run.keep(rows)
        if "clocked" in stages:
            rows += await play_clocked(run, dtype)
            run.keep(rows)
    if "lease" in stages:
        rows += await play_lease(run)
    return rows
