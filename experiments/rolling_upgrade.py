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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from experiments.engines.faults import count, kill
from experiments.engines.releases import python_of
from experiments.engines.routed import (
    KINDS,
    TOGETHER,
    Ends,
    Play,
    Prompt,
    Told,
    answers_alone,
    half,
    options_for,
    playing,
)
from experiments.harness import (
    Goal,
    chosen,
    conclude,
    console_of,
    options_of,
    show_said,
    table_of,
)
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import Engine, EngineSpec, Options
from kvpatch.tools.verify.run import progress_bar, until_signal

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
class Phase(Ends):
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
    reads: int | None = None


@dataclass(frozen=True)
class Run:
    """One upgrade."""

    old: str
    new: str
    order: str
    way: str
    has_kvpatch: bool
    options: Options

    @property
    def engines(self) -> str:
        return "kvpatch on D" if self.has_kvpatch else "stock"

    def spec(self, side: str, release: str) -> EngineSpec:
        on = self.has_kvpatch and side == "D"
        name = f"{self.order[0]}-{self.way}-{'kvpatch' if self.has_kvpatch else 'stock'}"
        accepted = (("KVPATCH_ACCEPT", "vllm_version"),) if on else ()
        spec = half(
            f"{name}-{side}-{release}", self.options, 32, 32768, on, accepted, lease_s=_LEASE_S
        )
        return replace(spec, python=python_of(release))


@dataclass
class Fleet:
    """The engines of a run, of which one after the other is replaced under way.

    Attributes:
        phases: the requests of each, by the phase in which they ended; the last one is going on.
    """

    run: Run
    play: Play
    prompts: Iterator[Prompt]
    each: int
    phases: dict[str, Told] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    reads: int = 0
    _stops: bool = False
    _is_up: asyncio.Event = field(default_factory=asyncio.Event)
    _starts: bool = False
    _under_way: set[object] = field(default_factory=set)

    async def upgrade(self) -> None:
        """All phases, beside the clients."""
        self._is_up.set()
        self._begin()
        clients = [asyncio.create_task(self._client()) for _ in range(TOGETHER)]
        try:
            await self._until_answered(clients)
            for side in self.run.order[0], "D" if self.run.order[0] == "P" else "P":
                self._begin(f"{side} is replaced, ")
                await self._replace(side)
                self._begin()
                await self._until_answered(clients)
            self._stops = True
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
        self.reads += await self._reads_of(self.play.decode)

    def _begin(self, event: str = "") -> None:
        """From now on requests are of another phase."""
        pair = self.play.prefill, self.play.decode
        releases = (one.spec.name.rpartition("-")[2] for one in pair)
        self.told = self.phases[event + " → ".join(releases)] = Told()

    async def _until_answered(self, clients: Sequence[asyncio.Task[None]]) -> None:
        while self.told.outcomes.total() < self.each:
            for client in clients:
                if client.done():
                    client.result()  # what it failed with
            await asyncio.sleep(0.1)

    async def _client(self) -> None:
        while not self._stops:
            await self._is_up.wait()
            request = object()
            self._under_way.add(request)
            outcome = await self.play.served(next(self.prompts))
            self._under_way.remove(request)
            self.told(outcome)  # of the phase that goes on: a killed engine's requests end with it
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
            begun = set(self._under_way)  # what may have gone to the old engine
            while begun & self._under_way:
                await asyncio.sleep(0.1)
            self.reads += await self._reads_of(old) if side == "D" else 0
            await asyncio.to_thread(old.stop)

    async def _reads_of(self, engine: Engine) -> int:
        await asyncio.sleep(1.0)  # a step's counts are in /metrics some time after its answer
        return await count(self.play.client, engine, READS)


async def play_run(
    run: Run, prompts: Sequence[Prompt], each: int, words: Sequence[int], console: Console
) -> list[Phase]:
    """One upgrade, from engines of the old release to ones of the new."""
    specs = (run.spec("P", run.old), run.spec("D", run.old))
    async with playing(specs, words, run.options, console) as play:
        await play.introduce(prompts[:_WARM_UP], "any upgrade")
        fleet = Fleet(run, play, itertools.cycle(prompts[_WARM_UP:]), each)
        with progress_bar(console) as progress:
            title = f"{run.engines}, {run.order}, {run.way}: {run.old} → {run.new}"
            task = progress.add_task(title, total=None)
            await fleet.upgrade()
            progress.update(task, total=1, completed=1)
    rows = [
        Phase(
            *(run.engines, run.old, run.new, run.order, run.way, name),
            **told.ends(told.outcomes.total()),
        )
        for name, told in fleet.phases.items()
    ]
    return [*rows[:-1], replace(rows[-1], reads=fleet.reads)]


async def upgrades(
    runs: Sequence[Run], each: int, options: Options, console: Console
) -> list[Phase]:
    """The single engine's answers, then run after run."""
    words, found = await answers_alone("upgrade-single", 512, _POOL, options, console)
    rows = []
    for run in runs:
        its = await play_run(run, found, each, words, console)
        console.print(table(its))
        rows += its
    return rows


def table(rows: Sequence[Phase]) -> Table:
    title = "requests by the engines there when they ended; wrong: with HTTP 200"
    columns = ("engines", "upgrade", "order", "way", "P → D", "requests", "right", "wrong",
               "failed at P", "failed at D", "broken at P", "broken at D", "no answer",
               "reads")  # fmt: skip
    return table_of(title, columns, (
        (row.engines, f"{row.old} → {row.new}", row.order, row.way, row.between, str(row.requests),
         *(str(getattr(row, kind)) for kind in KINDS), "" if row.reads is None else str(row.reads))
        for row in rows
    ), texts=5)  # fmt: skip


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
    with exit_statuses():
        orders = chosen(options.orders, ORDERS, "--orders")
        ways = chosen(options.ways, WAYS, "--ways")
        for release in (options.old, options.new):
            python_of(release)  # minutes where its environment is missing
        of_run = options_for(options.work_dir, "upgrade", console)
        runs = [
            Run(options.old, options.new, order, way, True, of_run)
            for order in orders
            for way in ways
        ]
        if options.stock:
            runs.append(Run(options.old, options.new, orders[0], ways[0], False, of_run))
        rows = until_signal(upgrades(runs, options.requests, of_run, console))
    console.print(table(rows))
    for row in rows:
        where = f"{row.engines}, {row.order}, {row.way}, {row.between}"
        show_said(where, row.said, console)
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    main()
