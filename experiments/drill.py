"""Plays faults while real engines serve, and compares the answers and the counts of failures.

    experiments/drill.sh [--pairs stock,both] [--scenes stale,link] [--requests 5000]

vLLM's servers on the CPU with a tiny random Llama. P has a small cache and a lease of 2 s. Each
answer is compared with a single engine's. ``engines/scenes.py`` has the scenes.

"wrong" has HTTP 200. "failed" is told by an engine, "broken" is a connection that ended without an
answer; both are asked again after the fault. D keeps its handshake with a P that came back under
its engine id, so D is restarted before that. The counts of P and D are from /metrics. With --check
the exit status is 1 if kvpatch on both sides gave a wrong answer, left one out or counted one
otherwise, or if stock's stale blocks went unseen: then nothing was drilled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from experiments.engines.faults import ENDED, count
from experiments.engines.routed import (
    KINDS,
    Ends,
    Play,
    Prompt,
    Told,
    answers_alone,
    batches,
    half,
    options_for,
    playing,
)
from experiments.engines.scenes import LEASE_S, SCENES
from experiments.harness import (
    Goal,
    Published,
    chosen,
    conclude,
    console_of,
    options_of,
    show_said,
)
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import Engine, EngineSpec, Options, free_ports
from kvpatch.tools.verify.run import progress_bar, until_signal

#: P's is small enough for a few other prompts to take every block.
PREFILL_CACHE_TOKENS = 2048
DECODE_CACHE_TOKENS = 16384
_WARM_UP = 2


@dataclass(frozen=True)
class Pair:
    """Which engines have kvpatch, and tokens of P's blocks."""

    title: str
    prefill_kvpatch: bool
    decode_kvpatch: bool
    prefill_tokens: int = 32


_RELEASE = "0.32.0"
_FAULTS = {
    "stale": "D held up past the lease",
    "link": "P held up as D reads",
    "replaced": "P killed and back under its id before D reads",
    "kill-p": "P killed among requests, back under its id",
    "kill-d": "D killed among requests, back under its id",
}
PAIRS = {
    "stock": Pair("stock", False, False),
    "d-alone": Pair("kvpatch on D", False, True),
    "both": Pair("kvpatch on both", True, True),
    "both-64-32": Pair("kvpatch on both, blocks of 64 and 32 tokens", True, True, 64),
}


@dataclass(frozen=True)
class Row(Ends):
    """One scene with one pair.

    Attributes:
        again_right: of those that failed, asked again after the scene.
        counted_at_p: requests that ended with an error, by P's count; None where P was another one.
        counted_at_d: the same by D's.
        ended: engines that ended by themselves.
    """

    pair: str
    scene: str
    again_right: int
    again_wrong: int
    again_failed: int
    counted_at_p: int | None
    counted_at_d: int | None
    ended: list[str]


async def scene(
    play: Play, pair: str, name: str, prompts: Sequence[Prompt], progress: Progress
) -> Row:
    """One scene and the engines' own counts of it, then once more what has failed in it."""
    task = progress.add_task(f"{pair}: {name}", total=len(prompts))
    told = Told(lambda: progress.advance(task))
    before = await counts(play)
    await SCENES[name](play, prompts, told)
    ended = await revive(play)
    at_p, at_d = map(since, before, await counts(play))
    if at_p is None and at_d is not None:
        # D keeps the handshake with the P that was killed.
        await play.restart(play.decode)
    again = Counter[str]()
    for batch in batches(told.failed):
        again.update(outcome.kind for outcome in await asyncio.gather(*map(play.served, batch)))
    ended += await revive(play)
    return Row(
        pair=pair,
        scene=name,
        again_right=again["right"],
        again_wrong=again["wrong"],
        again_failed=again.total() - again["right"] - again["wrong"],
        counted_at_p=at_p,
        counted_at_d=at_d,
        ended=ended,
        **told.ends(len(prompts)),
    )


Counted = tuple[int | None, int]
"""The process group of one engine, and the requests that it has ended with an error."""


async def counts(play: Play) -> tuple[Counted, Counted]:
    """Returns P's count, and D's."""
    # A step's counts are in /metrics some time after its answer.
    await asyncio.sleep(1.0)

    async def of(one: Engine) -> Counted:
        return one.group, await count(play.client, one, ENDED, finished_reason="error")

    return await of(play.prefill), await of(play.decode)


def since(before: Counted, now: Counted) -> int | None:
    """Returns what an engine has counted since; None if another one has taken its place."""
    return now[1] - before[1] if now[0] == before[0] else None


async def revive(play: Play) -> list[str]:
    """Starts again what has ended by itself; names it."""
    ended = []
    for one in (play.prefill, play.decode):
        try:
            one.require_alive()
        except EngineFailed:
            ended.append(one.spec.name)
            await play.restart(one)
    return ended


def engine(name: str, side: str, options: Options, policy: str) -> EngineSpec:
    """P or D; the next one in its place has its engine id and its side channel."""
    pair, name = PAIRS[name], f"drill-{name}-{side}"
    block_tokens, cache_tokens, on = (
        (pair.prefill_tokens, PREFILL_CACHE_TOKENS, pair.prefill_kvpatch)
        if side == "prefill"
        else (32, DECODE_CACHE_TOKENS, pair.decode_kvpatch)
    )
    settings = (("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(8))),)
    return half(
        *(name, options, block_tokens, cache_tokens, on, settings),
        lease_s=LEASE_S,
        engine_id=name,
        kv_load_failure_policy=policy,
    )


async def drill(
    pairs: Sequence[str],
    scenes: Sequence[str],
    requests: int,
    policy: str,
    options: Options,
    console: Console,
) -> list[Row]:
    """The single engine's answers, then pair after pair: all scenes, each with its own prompts."""
    words, prompts = await answers_alone(
        "drill-single",
        DECODE_CACHE_TOKENS // 32,
        _WARM_UP + len(scenes) * requests,
        options,
        console,
    )
    rows: list[Row] = []
    for pair in pairs:
        specs = [engine(pair, side, options, policy) for side in ("prefill", "decode")]
        its = []
        async with playing(specs, words, options, console) as play:
            await play.introduce(prompts[:_WARM_UP], f"any fault of {pair}")
            with progress_bar(console) as progress:
                for number, name in enumerate(scenes):
                    start = _WARM_UP + number * requests
                    of_scene = prompts[start : start + requests]
                    its.append(await scene(play, pair, name, of_scene, progress))
        console.print(table(its).drawn())
        rows += its
    return rows


def table(rows: Sequence[Row]) -> Published:
    shown = []
    for row in rows:
        again = row.again_right + row.again_wrong + row.again_failed
        shown.append([
            _FAULTS[row.scene], PAIRS[row.pair].title, f"{row.requests:,}", str(row.right),
            str(row.wrong), str(row.failed_at_d),
            "-" if row.counted_at_d is None else str(row.counted_at_d),
            str(row.broken_at_p + row.broken_at_d), str(row.no_answer),
            f"{row.again_right} of {again}",
        ])  # fmt: skip
    columns = ("fault", "P and D", "requests", "right", "wrong, HTTP 200", "failed at D",
               "D's count", "connection broken", "no answer", "asked again: right")  # fmt: skip
    return Published("drill", "experiments/drill.sh", _RELEASE, columns, shown)


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Judges kvpatch on both sides, and that stock's pair shows the faults."""
    found = []
    for row in rows:
        where = f"{row.pair}, {row.scene}"
        if row.pair == "stock" and row.scene == "stale":
            found.append(Goal(f"{where}: wrong answers", row.wrong, 1, is_least=True))
        if not (PAIRS[row.pair].prefill_kvpatch and PAIRS[row.pair].decode_kvpatch):
            continue
        found.append(Goal(f"{where}: wrong answers", row.wrong + row.again_wrong, 0))
        found.append(Goal(f"{where}: without an answer", row.no_answer + row.again_failed, 0))
        found.append(Goal(f"{where}: engines that ended by themselves", len(row.ended), 0))
        told_of = sum(getattr(row, kind) for kind in KINDS)
        found.append(Goal(f"{where}: requests not told of once", abs(row.requests - told_of), 0))
        sides = (
            ("P", row.counted_at_p, row.failed_at_p, row.broken_at_p),
            ("D", row.counted_at_d, row.failed_at_d, row.broken_at_d),
        )
        for side, counted, failed, broken in sides:
            if counted is not None:  # it is the one that it was, and has no reason to break any
                name = f"{where}: failures that {side} counted otherwise"
                found.append(Goal(name, abs(counted - failed) + broken, 0))
    return found


def main() -> None:
    options = options_of(
        __doc__,
        pairs=(None, "by commas: " + ", ".join(PAIRS)),
        scenes=(None, "by commas: " + ", ".join(SCENES)),
        requests=(5000, "of each pair, shared out among its scenes"),
        policy=("fail", "for loads that fail: fail or recompute"),
        work_dir=(None, "for logs and the model; kept"),
    )
    console = console_of(150)
    with exit_statuses():
        scenes = chosen(options.scenes, list(SCENES), "--scenes")
        rows = until_signal(
            drill(
                chosen(options.pairs, list(PAIRS), "--pairs"),
                scenes,
                -(-options.requests // len(scenes)),
                options.policy,
                options_for(options.work_dir, "drill", console),
                console,
            )
        )
    for row in rows:
        show_said(f"{row.pair}, {row.scene}", row.said, console)
    conclude(rows, goals(rows), options, console, table(rows))


if __name__ == "__main__":
    main()
