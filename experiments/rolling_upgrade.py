"""Replaces engines by ones of another release while requests run, and compares the answers.

    experiments/rolling_upgrade.sh [--old 0.31.0] [--new 0.32.0] [--requests 60]

vLLM's servers on the CPU with a tiny random Llama, each release in its own environment. P is stock.
D has kvpatch and KVPATCH_ACCEPT=vllm_version, or is stock too ("stock"). Each answer is compared
with a single engine's. Both engines are replaced, in either order, while eight clients ask:

``beside``   The new engine starts beside the old one and gets new requests once it is ready.
``killed``   kill -9 of the old engine; clients wait for the new one, which has its own engine id.

"wrong" has HTTP 200. "failed" is told by an engine. "broken" is a connection that ended without an
answer. "reads" counts the successful transfers of both D. With --check the exit status is 1 if
kvpatch gave a wrong answer or left one out, or if stock took no harm: then nothing was tried.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from experiments.engines.checkout import importable_in_engines
from experiments.engines.faults import count, kill
from experiments.engines.releases import python_of
from experiments.engines.routed import TOGETHER, Play, Prompt, answers_alone, by_kind, connections
from experiments.harness import (
    Goal,
    chosen,
    conclude,
    console_of,
    options_of,
    show_said,
    table_of,
    work_folder,
)
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import TRANSFER_CONFIG, Engine, EngineSpec, Options, small_engine
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import progress_bar, require_kvpatch_as_asked, running, until_signal

READS = "vllm:nixl_xfer_time_seconds_count"
"""D's own count of transfers that succeeded."""

_POOL = 400
"""Prompts, which come again where a run takes longer: D has them in its cache by then or reads."""

_PAUSE_S = 1.0
"""Between two requests of a client while an engine starts, which needs the processor."""

_WARM_UP = 2
_LEASE_S = 30
"""What failed is not read, and its blocks at P are to be had again while a run lasts."""

ORDERS = ("P first", "D first")
WAYS = ("beside", "killed")


@dataclass(frozen=True)
class Phase:
    """Counts of the requests that ended between two events of one run.

    Attributes:
        engines: "stock", or "kvpatch on D".
        between: releases of P and D, or what was replaced meanwhile.
        reads: by the counts of all D's, at the run's last phase; None at others.
    """

    engines: str
    old: str
    new: str
    order: str
    way: str
    between: str
    requests: int
    right: int
    wrong: int
    failed_at_p: int
    failed_at_d: int
    broken_at_p: int
    broken_at_d: int
    no_answer: int
    said: dict[str, int]
    reads: int | None = None


@dataclass
class Books:
    """Requests by the phase in which they ended."""

    phase: str = ""
    ended: dict[str, Counter[str]] = field(default_factory=dict)
    said: dict[str, Counter[str]] = field(default_factory=dict)

    def begin(self, phase: str) -> None:
        """From now on requests are of this phase."""
        self.phase = phase
        self.ended[phase], self.said[phase] = Counter(), Counter()

    @property
    def answered(self) -> int:
        """Requests of the present phase whose end is known."""
        return self.ended[self.phase].total()


@dataclass(frozen=True)
class Run:
    """One upgrade."""

    old: str
    new: str
    order: str
    way: str
    has_kvpatch: bool
    model: str

    @property
    def engines(self) -> str:
        return "kvpatch on D" if self.has_kvpatch else "stock"

    def spec(self, side: str, release: str) -> EngineSpec:
        on = self.has_kvpatch and side == "D"
        name = f"{self.order[0]}-{self.way}-{'kvpatch' if self.has_kvpatch else 'stock'}"
        extra = {"kv_lease_duration": _LEASE_S}
        config = {**TRANSFER_CONFIG, "kv_connector_extra_config": extra}
        arguments = (
            *("--block-size", "32", "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", "1024"),
            *("--kv-transfer-config", json.dumps(config)),
        )
        accepted = (("KVPATCH_ACCEPT", "vllm_version"),) if on else ()
        spec = small_engine(
            f"{name}-{side}-{release}", self.model, "float32", arguments, True, on, accepted
        )
        return replace(spec, python=python_of(release))


@dataclass
class Fleet:
    """The engines of a run, of which one after the other is replaced under way."""

    run: Run
    play: Play
    books: Books
    prompts: Iterator[Prompt]
    each: int
    reads: int = 0
    _stops: bool = False
    _is_up: asyncio.Event = field(default_factory=asyncio.Event)
    _starts: bool = False
    _under_way: set[int] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def upgrade(self) -> None:
        """All phases, beside the clients."""
        self._is_up.set()
        self.books.begin(self._between())
        clients = [asyncio.create_task(self._client()) for _ in range(TOGETHER)]
        try:
            await self._until_answered(clients)
            for side in self.run.order[0], "D" if self.run.order[0] == "P" else "P":
                self.books.begin(f"{side} is replaced, {self._between()}")
                await self._replace(side)
                self.books.begin(self._between())
                await self._until_answered(clients)
            self._stops = True
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
        self.reads += await self._reads_of(self.play.decode)

    def _between(self) -> str:
        return " → ".join(
            one.spec.name.rpartition("-")[2] for one in (self.play.prefill, self.play.decode)
        )

    async def _until_answered(self, clients: Sequence[asyncio.Task[None]]) -> None:
        while self.books.answered < self.each:
            for client in clients:
                if client.done():
                    client.result()  # what it failed with
            await asyncio.sleep(0.1)

    async def _client(self) -> None:
        while not self._stops:
            await self._is_up.wait()
            number = next(self._numbers)
            self._under_way.add(number)
            outcome = await self.play.served(next(self.prompts))
            self._under_way.remove(number)
            phase = self.books.phase  # a killed engine's requests end with it
            self.books.ended[phase][outcome.kind] += 1
            if outcome.kind not in ("right", "wrong"):
                self.books.said[phase][f"{outcome.kind}: {outcome.said}"] += 1
            await asyncio.sleep(_PAUSE_S if self._starts else 0.0)

    async def _replace(self, side: str) -> None:
        """An engine of the new release where one of the old one was."""
        old = self.play.prefill if side == "P" else self.play.decode
        spec = self.run.spec(side, self.run.new)
        made = Engine(spec, self.play.options.work_dir / f"{spec.name}.log")
        if self.run.way == "killed":
            self.reads += await self._reads_of(old) if side == "D" else 0
            self._is_up.clear()
            await kill(old)
        self._starts = True
        try:
            made.start()
            await made.ready(self.play.client, self.play.options.startup_timeout)
        except BaseException:
            made.stop()
            raise
        finally:
            self._starts = False
        if side == "P":
            self.play.prefill = made
        else:
            self.play.decode = made
        self._is_up.set()
        if self.run.way == "beside":
            await self._drained()
            self.reads += await self._reads_of(old) if side == "D" else 0
            await asyncio.to_thread(old.stop)

    async def _drained(self) -> None:
        """Until what may have gone to the old engine is over."""
        begun = set(self._under_way)
        while begun & self._under_way:
            await asyncio.sleep(0.1)

    async def _reads_of(self, engine: Engine) -> int:
        await asyncio.sleep(1.0)  # a step's counts are in /metrics some time after its answer
        return await count(self.play.client, engine, READS)


def phases(fleet: Fleet) -> list[Phase]:
    run, books = fleet.run, fleet.books
    rows = [
        Phase(
            *(run.engines, run.old, run.new, run.order, run.way, name, sent.total()),
            **by_kind(sent),
            said=dict(books.said[name]),
        )
        for name, sent in books.ended.items()
    ]
    return [*rows[:-1], replace(rows[-1], reads=fleet.reads)]


async def play_run(
    run: Run,
    prompts: Sequence[Prompt],
    each: int,
    words: Sequence[int],
    options: Options,
    console: Console,
) -> list[Phase]:
    """One upgrade, from engines of the old release to ones of the new."""
    specs = (run.spec("P", run.old), run.spec("D", run.old))
    async with connections() as client, running(specs, client, options, console) as engines:
        await require_kvpatch_as_asked(client, engines)
        play = Play(client, options, *engines, words)
        await play.introduce(prompts[:_WARM_UP], "any upgrade")
        fleet = Fleet(run, play, Books(), itertools.cycle(prompts[_WARM_UP:]), each)
        try:
            with progress_bar(console) as progress:
                title = f"{run.engines}, {run.order}, {run.way}: {run.old} → {run.new}"
                task = progress.add_task(title, total=None)
                await fleet.upgrade()
                progress.update(task, total=1, completed=1)
        finally:
            for made in (play.prefill, play.decode):
                made.stop()
        return phases(fleet)


async def upgrades(
    runs: Sequence[Run], each: int, options: Options, console: Console
) -> list[Phase]:
    """The single engine's answers, then run after run."""
    words, found = await answers_alone("upgrade-single", 512, _POOL, options, console)
    rows = []
    for run in runs:
        its = await play_run(run, found, each, words, options, console)
        console.print(table(its))
        rows += its
    return rows


def table(rows: Sequence[Phase]) -> Table:
    shown = table_of("requests by the engines there when they ended; wrong: with HTTP 200", (
        "engines", "upgrade", "order", "way", "P → D", "requests", "right", "wrong", "failed at P",
        "failed at D", "broken at P", "broken at D", "no answer", "reads",
    ), (), texts=5)  # fmt: skip
    for row in rows:
        counts = (row.requests, row.right, row.wrong, row.failed_at_p, row.failed_at_d)
        rest = (row.broken_at_p, row.broken_at_d, row.no_answer)
        shown.add_row(
            *(row.engines, f"{row.old} → {row.new}", row.order, row.way, row.between),
            *map(str, (*counts, *rest)),
            "" if row.reads is None else str(row.reads),
        )
    return shown


def goals(rows: Sequence[Phase]) -> list[Goal]:
    """Judges kvpatch on D, and that stock's engines show what an upgrade does."""
    ours = [row for row in rows if row.engines != "stock"]
    stock = [row for row in rows if row.engines == "stock"]
    found = []
    for row in ours:
        where = f"{row.order}, {row.way}, {row.between}"
        found.append(Goal(f"{where}: wrong answers", row.wrong, 0))
        found.append(Goal(f"{where}: without an answer", row.no_answer, 0))
        if row.way == "beside" or "replaced" not in row.between:
            failed = row.failed_at_p + row.failed_at_d + row.broken_at_p + row.broken_at_d
            found.append(Goal(f"{where}: failures", failed, 0))
    for row in ours:
        if row.reads is None:
            continue
        of_run = [one for one in ours if (one.order, one.way) == (row.order, row.way)]
        # One that is killed takes with it what it had not counted yet.
        spare = TOGETHER if row.way == "killed" else 0
        right = sum(one.right for one in of_run) - spare
        where = f"{row.order}, {row.way}: reads for {right} answers"
        found.append(Goal(where, row.reads, right, is_least=True))
    if stock:
        harmed = sum(row.wrong + row.failed_at_d for row in stock)
        found.append(Goal("stock: wrong or failed at D", harmed, 1, is_least=True))
    return found


def main() -> None:
    options = options_of(
        __doc__,
        old=("0.31.0", "release that is replaced"),
        new=("0.32.0", "release in its place; may be older"),
        orders=(",".join(ORDERS), "by commas"),
        ways=(",".join(WAYS), "by commas"),
        stock=(False, "also without kvpatch: the first order and way"),
        requests=(60, "before, between and after what is replaced"),
        work_dir=(None, "for logs and the model; kept"),
    )
    console = console_of(160)
    importable_in_engines()
    with exit_statuses():
        orders = chosen(options.orders, ORDERS, "--orders")
        ways = chosen(options.ways, WAYS, "--ways")
        for release in (options.old, options.new):
            python_of(release)  # minutes where its environment is missing
        folder = work_folder(options.work_dir, "upgrade", console)
        model = str(make_tiny_llama(folder / "model"))
        runs = [
            Run(options.old, options.new, order, way, True, model)
            for order in orders
            for way in ways
        ]
        if options.stock:
            runs.append(Run(options.old, options.new, orders[0], ways[0], False, model))
        of_run = Options(work_dir=folder, model=model)
        rows = until_signal(upgrades(runs, options.requests, of_run, console))
    console.print(table(rows))
    for row in rows:
        where = f"{row.engines}, {row.order}, {row.way}, {row.between}"
        show_said(where, row.said, console)
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    main()
