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
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from experiments.engines.checkout import importable_in_engines
from experiments.engines.faults import ENDED, count, is_alive
from experiments.engines.routed import (
    KINDS,
    Play,
    Prompt,
    answers_alone,
    batches,
    by_kind,
    connections,
)
from experiments.engines.scenes import LEASE_S, SCENES, Told
from experiments.harness import (
    Goal,
    Published,
    chosen,
    conclude,
    console_of,
    options_of,
    show_said,
    work_folder,
)
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import (
    TRANSFER_CONFIG,
    Engine,
    EngineSpec,
    Options,
    free_ports,
    small_engine,
)
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import progress_bar, require_kvpatch_as_asked, running, until_signal

#: P's is small enough for a few other prompts to take every block.
PREFILL_CACHE_TOKENS = 2048
DECODE_CACHE_TOKENS = 16384
_WARM_UP = 2


@dataclass(frozen=True)
class Pair:
    """Which engines have kvpatch, and tokens of their blocks."""

    name: str
    prefill_kvpatch: bool
    decode_kvpatch: bool
    prefill_tokens: int = 32

    @property
    def is_ours(self) -> bool:
        """True if nothing may go wrong with it."""
        return self.prefill_kvpatch and self.decode_kvpatch


_RELEASE = "0.32.0"
_FAULTS = {
    "stale": "D held up past the lease",
    "link": "P held up as D reads",
    "replaced": "P killed and back under its id before D reads",
    "kill-p": "P killed among requests, back under its id",
    "kill-d": "D killed among requests, back under its id",
}
_PAIRS = {
    "stock": "stock",
    "d-alone": "kvpatch on D",
    "both": "kvpatch on both",
    "both-64-32": "kvpatch on both, blocks of 64 and 32 tokens",
}
PAIRS = (
    Pair("stock", False, False),
    Pair("d-alone", False, True),
    Pair("both", True, True),
    Pair("both-64-32", True, True, prefill_tokens=64),
)


@dataclass(frozen=True)
class Row:
    """One scene with one pair.

    Attributes:
        said: what failures said, and how often.
        again_right: of those that failed, asked again after the scene.
        counted_at_p: requests that ended with an error, by P's count; None where P was another one.
        counted_at_d: the same by D's.
        ended: engines that ended by themselves.
    """

    pair: str
    scene: str
    requests: int
    right: int
    wrong: int
    failed_at_p: int
    failed_at_d: int
    broken_at_p: int
    broken_at_d: int
    no_answer: int
    again_right: int
    again_wrong: int
    again_failed: int
    counted_at_p: int | None
    counted_at_d: int | None
    ended: list[str]
    said: dict[str, int]


async def scene(
    play: Play, pair: Pair, name: str, prompts: Sequence[Prompt], progress: Progress
) -> Row:
    """One scene and the engines' own books of it, then once more what has failed in it."""
    task = progress.add_task(f"{pair.name}: {name}", total=len(prompts))
    told = Told(lambda: progress.advance(task))
    p_before, d_before = await read_books(play)
    await SCENES[name](play, prompts, told)
    ended = await revive(play)
    p_now, d_now = await read_books(play)
    if p_before.group != p_now.group and d_before.group == d_now.group:
        # D keeps the handshake with the P that was killed.
        await play.restart(play.decode)
    again = Counter[str]()
    for batch in batches(told.failed):
        again.update(outcome.kind for outcome in await asyncio.gather(*map(play.served, batch)))
    ended += await revive(play)
    return Row(
        pair=pair.name,
        scene=name,
        requests=len(prompts),
        **by_kind(told.outcomes),
        again_right=again["right"],
        again_wrong=again["wrong"],
        again_failed=again.total() - again["right"] - again["wrong"],
        counted_at_p=since(p_before, p_now),
        counted_at_d=since(d_before, d_now),
        ended=ended,
        said=dict(told.said),
    )


@dataclass(frozen=True)
class Book:
    """Requests that one engine has ended with an error; ``group`` says which process it was."""

    group: int | None
    failed: int


async def read_books(play: Play) -> tuple[Book, Book]:
    # A step's counts are in /metrics some time after its answer.
    await asyncio.sleep(1.0)

    async def book(one: Engine) -> Book:
        return Book(one.group, await count(play.client, one, ENDED, finished_reason="error"))

    return await book(play.prefill), await book(play.decode)


def since(before: Book, now: Book) -> int | None:
    """Returns what an engine has counted since; None if another one has taken its place."""
    return now.failed - before.failed if now.group == before.group else None


async def revive(play: Play) -> list[str]:
    """Starts again what has ended by itself; names it."""
    ended = [one for one in (play.prefill, play.decode) if not is_alive(one)]
    for one in ended:
        await play.restart(one)
    return [one.spec.name for one in ended]


def engine(
    pair: Pair, side: str, model: str, block_tokens: int, cache_tokens: int, policy: str
) -> EngineSpec:
    """P or D; the next one in its place has its engine id and its side channel."""
    name = f"drill-{pair.name}-{side}"
    config = {
        **TRANSFER_CONFIG,
        "engine_id": name,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    arguments = (
        *("--block-size", str(block_tokens), "--max-num-seqs", "16"),
        *("--num-gpu-blocks-override", str(cache_tokens // block_tokens)),
        *("--kv-transfer-config", json.dumps(config)),
    )
    settings = (("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(8))),)
    on = pair.prefill_kvpatch if side == "prefill" else pair.decode_kvpatch
    return small_engine(name, model, "float32", arguments, True, on, settings)


@dataclass(frozen=True)
class Asking:
    """The scenes and pairs of one run; ``requests`` are of each scene of each pair."""

    pairs: Sequence[Pair]
    scenes: Sequence[str]
    requests: int
    policy: str


async def play_pair(
    pair: Pair,
    asking: Asking,
    prompts: Sequence[Prompt],
    words: Sequence[int],
    options: Options,
    console: Console,
) -> list[Row]:
    """All scenes of one pair, each with prompts that it has not met."""
    specs = (
        engine(pair, "prefill", str(options.model), pair.prefill_tokens, PREFILL_CACHE_TOKENS,
               asking.policy),
        engine(pair, "decode", str(options.model), 32, DECODE_CACHE_TOKENS, asking.policy),
    )  # fmt: skip
    rows = []
    async with connections() as client, running(specs, client, options, console) as engines:
        await require_kvpatch_as_asked(client, engines)
        prefill, decode = engines
        play = Play(client, options, prefill, decode, words)
        await play.introduce(prompts[:_WARM_UP], f"any fault of {pair.name}")
        with progress_bar(console) as progress:
            for number, name in enumerate(asking.scenes):
                start = _WARM_UP + number * asking.requests
                its = prompts[start : start + asking.requests]
                rows.append(await scene(play, pair, name, its, progress))
    return rows


async def drill(asking: Asking, options: Options, console: Console) -> list[Row]:
    """The single engine's answers, then pair after pair."""
    wanted = _WARM_UP + len(asking.scenes) * asking.requests
    words, prompts = await answers_alone(
        "drill-single", DECODE_CACHE_TOKENS // 32, wanted, options, console
    )
    rows = []
    for pair in asking.pairs:
        its = await play_pair(pair, asking, prompts, words, options, console)
        console.print(table(its).drawn())
        rows += its
    return rows


def table(rows: Sequence[Row]) -> Published:
    shown = []
    for row in rows:
        again = row.again_right + row.again_wrong + row.again_failed
        shown.append([
            _FAULTS[row.scene], _PAIRS[row.pair], f"{row.requests:,}", str(row.right),
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
    ours = {pair.name for pair in PAIRS if pair.is_ours}
    for row in rows:
        where = f"{row.pair}, {row.scene}"
        if row.pair == "stock" and row.scene == "stale":
            found.append(Goal(f"{where}: wrong answers", row.wrong, 1, is_least=True))
        if row.pair not in ours:
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
        pairs=(None, "by commas: " + ", ".join(pair.name for pair in PAIRS)),
        scenes=(None, "by commas: " + ", ".join(SCENES)),
        requests=(5000, "of each pair, shared out among its scenes"),
        policy=("fail", "for loads that fail: fail or recompute"),
        work_dir=(None, "for logs and the model; kept"),
    )
    console = console_of(150)
    importable_in_engines()
    with exit_statuses():
        pairs = chosen(options.pairs, [pair.name for pair in PAIRS], "--pairs")
        scenes = chosen(options.scenes, list(SCENES), "--scenes")
        folder = work_folder(options.work_dir, "drill", console)
        model = str(make_tiny_llama(folder / "model"))
        asking = Asking(
            [pair for pair in PAIRS if pair.name in pairs],
            scenes,
            -(-options.requests // len(scenes)),
            options.policy,
        )
        of_run = Options(work_dir=folder, model=model)
        rows = until_signal(drill(asking, of_run, console))
    published = table(rows)
    console.print(published.drawn())
    for row in rows:
        show_said(f"{row.pair}, {row.scene}", row.said, console)
    conclude(rows, goals(rows), options, console, published)


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    main()
