"""Runs the table of heterogeneous pairs: each single engine once, then row after row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.engines.kvcached_pairs import require_layouts
from experiments.engines.models import MAKERS
from experiments.engines.pairs import Row, Side, Single, by_single, row_setups, single_setup
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.verify.compare import Observation, SetupComparison, compare
from kvpatch.tools.verify.engine import Engine, Options, Setup, require_environment, stop_all
from kvpatch.tools.verify.model import Case, build_cases
from kvpatch.tools.verify.run import Serving, require_kvpatch_as_asked, running, vocabulary

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

_PATCH = "unlike_engines"
_TIMEOUT_S = 120.0

HOST_BUFFER = "host buffer of "
"""How each worker's line about its own begins."""

_EXCEPTION = re.compile(
    r"^.*\bERROR\b.*?\b([A-Z]\w*(?:Error|Exception|Refused): .+)$", re.MULTILINE
)


@dataclass(frozen=True)
class RowResult:
    """One row, judged against its single engine.

    Attributes:
        comparison: of ``stock`` and ``kvpatch`` with ``single``.
        failure: why an engine could not be started or observed.
        reasons: set-up -> what its decode engine's log says went wrong last.
    """

    row: Row
    comparison: SetupComparison
    failure: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def unnoticed(self) -> list[str]:
        """The prompts whose cache was spoiled at D behind kvpatch and that nobody noticed."""
        failures = self.comparison.control_failures
        return [name for name in failures if name.startswith("kvpatch/")]

    @property
    def passed(self) -> bool:
        """True if kvpatch's answers and caches are all identical and its control was noticed."""
        verdicts = self.comparison.verdicts.get("kvpatch", {})
        return bool(
            not self.failure
            and verdicts
            and self.comparison.control.get("kvpatch")
            and all(verdict.identical for verdict in verdicts.values())
            and not self.unnoticed
        )


async def run_pairs(
    rows: Sequence[Row],
    options: Options,
    console: Console,
    report: Callable[[RowResult], None],
    *,
    with_stock: bool = True,
) -> list[RowResult]:
    """Run the rows; ``report`` is told each as soon as it is judged.

    An engine that does not start is its row's failure, a single engine that of all its rows; the
    run goes on.
    """
    import httpx

    require_environment()
    results = []
    async with httpx.AsyncClient(trust_env=False) as client:
        for single, its_rows in by_single(rows).items():
            with console.status(f"making a tiny random model: {single.model}"):
                model = str(MAKERS[single.model](options.work_dir / f"model-{single.model}"))
            try:
                cases, reference = await _observe_single(single, model, client, options, console)
            except EngineFailed as error:
                nothing: dict[str, dict[str, Observation]]
                nothing = {"single": {}, "stock": {}, "kvpatch": {}}
                for row in its_rows:
                    results.append(RowResult(row, compare((), nothing), str(error)))
                    report(results[-1])
                continue
            for row in its_rows:
                console.rule(row.name)
                run = _RowRun(row, model, cases, client, options, console, with_stock)
                results.append(await run.judge(reference))
                report(results[-1])
    return results


async def _observe_single(
    single: Single, model: str, client: httpx.AsyncClient, options: Options, console: Console
) -> tuple[tuple[Case, ...], dict[str, Observation]]:
    setup = single_setup(single, model)
    async with running(setup.specs, client, options, console) as engines:
        cases = build_cases(await vocabulary(client, engines[0]))
        if single.has_state:  # of one token nothing is transferred, and P keeps the state behind it
            cases = tuple(case for case in cases if case.tokens > 1)
        serving = Serving(f"single ({single})", engines, (), client, options, console)
        return cases, await serving.observe(cases)


def last_exception(log: Path) -> str:
    """The last line of a log that names an exception, from its name on; empty if none does.

    That the engine is dead, as its front end says, is not why.
    """
    text = log.read_text(errors="replace") if log.exists() else ""
    named = (match.group(1).strip() for match in _EXCEPTION.finditer(text))
    return next(reversed([name for name in named if not name.startswith("EngineDead")]), "")


@dataclass
class _RowRun:
    row: Row
    model: str
    cases: tuple[Case, ...]
    client: httpx.AsyncClient
    options: Options
    console: Console
    with_stock: bool
    reasons: dict[str, str] = field(default_factory=dict)

    async def judge(self, reference: dict[str, Observation]) -> RowResult:
        observations = {"single": reference, "stock": {}, "kvpatch": {}}
        failure = ""
        try:
            await self._observe(observations)
        except EngineFailed as error:
            failure = str(error)
        comparison = compare(self.cases, observations, same_prefill=self.row.same_prefill)
        return RowResult(self.row, comparison, failure, dict(self.reasons))

    async def _observe(self, observations: dict[str, dict[str, Observation]]) -> None:
        """kvpatch first and stock after it, on the same prefill engines.

        A stock engine that fails leaves blocks behind at P until their lease ends.
        """
        stock, patched = row_setups(self.row, self.model)
        async with running(patched.specs, self.client, self.options, self.console) as engines:
            await require_kvpatch_as_asked(self.client, engines)
            count = len(patched.prefill)
            prefill, decode = engines[:count], engines[count:]
            await self._require_patch(decode)
            self._require_host_buffers(engines)
            await self._require_layouts(engines, (*self.row.prefill, self.row.decode))
            observations["kvpatch"] = await self._serve(patched, prefill, decode)
            for engine in engines:
                metrics = (await self._ask("GET", engine, "metrics")).text
                engine.log.with_suffix(".metrics").write_text(metrics)
            stop_all(decode)
            if not self.with_stock:
                return
            for engine in prefill:  # empties its prefix cache
                await self._ask("POST", engine, "reset_prefix_cache")
            try:
                async with running(stock.decode, self.client, self.options, self.console) as decode:
                    await self._require_layouts(decode, (self.row.decode,))
                    observations["stock"] = await self._serve(stock, prefill, decode)
            except EngineFailed as error:
                # What stock does is shown beside the row and decides nothing about it.
                self.reasons["stock"] = f"not observed to the end: {error}"

    async def _serve(
        self, setup: Setup, prefill: Sequence[Engine], decode: Sequence[Engine]
    ) -> dict[str, Observation]:
        # Only kvpatch's cache is spoiled: a stock pair that fails would not notice it.
        options = replace(self.options, negative_control=setup.name == "kvpatch")
        name = f"{self.row.name}, {setup.name}"
        serving = Serving(name, prefill, decode, self.client, options, self.console)
        observations = await serving.observe(self.cases)
        reason = "; ".join(filter(None, (last_exception(engine.log) for engine in decode)))
        if reason and any(found.error for found in observations.values()):
            self.reasons[setup.name] = reason
        return observations

    async def _ask(self, method: str, engine: Engine, path: str) -> httpx.Response:
        response = await self.client.request(method, f"{engine.url}/{path}", timeout=_TIMEOUT_S)
        response.raise_for_status()
        return response

    def _require_host_buffers(self, engines: Sequence[Engine]) -> None:
        """Where the row has them, every engine must have said how large its own are."""
        if self.row.host_buffer_bytes is None:
            return
        for engine in engines:
            if HOST_BUFFER not in engine.log.read_text(errors="replace"):
                raise EngineFailed(f"{engine.spec.name}: expected a host buffer, found none")

    async def _require_layouts(self, engines: Sequence[Engine], sides: Sequence[Side]) -> None:
        sides_of_row = (*self.row.prefill, self.row.decode)
        if self.row.single.cuda or any(side.kvcached for side in sides_of_row):
            await require_layouts(self.client, engines, sides, self.options.work_dir)

    async def _require_patch(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            for status in await engine.rpc(self.client, "kvpatch_process_status"):
                outcomes = {patch["slug"]: patch for patch in status["patches"]}
                found = outcomes.get(_PATCH)
                if found is None or found["outcome"] != "applied":
                    raise EngineFailed(
                        f"{engine.spec.name}: expected {_PATCH} to be applied, found {found}"
                    )
