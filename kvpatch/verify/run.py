"""The whole run: each set-up in turn, then the comparison."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvpatch._errors import KvpatchError
from kvpatch.verify.compare import Comparison, Observation, Snapshot, compare
from kvpatch.verify.engine import Engine, EngineFailed, EngineSpec, require_environment, stop_all
from kvpatch.verify.fingerprint import join_ranks
from kvpatch.verify.handoff import RequestFailed, complete, prefill_then_decode
from kvpatch.verify.model import make_tiny_llama, words
from kvpatch.verify.probe import LOADED, PREFILLED
from kvpatch.verify.prompts import Case, build_cases, steps
from kvpatch.verify.setups import Options, Setup, build_setups

if TYPE_CHECKING:
    import httpx
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

_VOCABULARY_WORDS = 200
_WARM_UP_TOKENS = 9
_WARM_UP_TRIES = 3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KvpatchError):
    """A signal ended the run; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True)
class Result:
    """Everything that a run has seen."""

    cases: tuple[Case, ...]
    observations: dict[str, dict[str, Observation]]
    comparison: Comparison


def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; a signal that asks the process to end cancels it first, so that it cleans up.

    Raises:
        Interrupted: a signal came.
    """

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        received: list[int] = []

        def cancel(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, cancel, number)
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise Interrupted(received[0]) from None
            raise

    return asyncio.run(guarded())


async def verify(options: Options, console: Console) -> Result:
    """Run every set-up that ``options`` ask for, and compare.

    Raises:
        EngineFailed: an engine could not be started or observed. Prompts that fail are no error
            but a difference.
    """
    import httpx

    setups = build_setups(options, _model(options, console))
    require_environment(any(spec.kvpatch for setup in setups for spec in setup.specs))
    cases: tuple[Case, ...] = ()
    observations: dict[str, dict[str, Observation]] = {}
    async with httpx.AsyncClient(trust_env=False) as client:
        for setup in setups:
            async with _running(setup.specs, client, options, console) as engines:
                await _require_kvpatch_as_asked(client, engines)
                if not cases:
                    cases = build_cases(await _vocabulary(client, engines[0]))
                run = _SetupRun(setup, engines, client, options, console)
                observations[setup.name] = await run.observe(cases)
    return Result(cases, observations, compare(cases, observations))


async def layout_of_tiny_engine(console: Console) -> list[Any]:
    """The cache layout of a tiny engine that is started for the purpose."""
    import tempfile

    import httpx

    with tempfile.TemporaryDirectory(prefix="kvpatch-layout-") as folder:
        options = Options(work_dir=Path(folder))
        require_environment(kvpatch=False)
        spec = build_setups(options, _model(options, console))[0].prefill
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            _running((spec,), client, options, console) as engines,
        ):
            return await engines[0].rpc(client, "kvpatch_layout")


def _model(options: Options, console: Console) -> str:
    if options.model is not None:
        return options.model
    with console.status("making a tiny random model"):
        return str(make_tiny_llama(options.work_dir / "model"))


@asynccontextmanager
async def _running(
    specs: Sequence[EngineSpec], client: httpx.AsyncClient, options: Options, console: Console
) -> AsyncIterator[list[Engine]]:
    """The engines, started side by side and ready; stopped on the way out, whatever happens."""
    engines = [Engine(spec, options.work_dir / f"{spec.name}.log") for spec in specs]
    try:
        with _progress(console) as progress:
            for engine in engines:
                engine.start()
            await asyncio.gather(*(_ready(engine, client, options, progress) for engine in engines))
        yield engines
    finally:
        stop_all(engines)


async def _ready(
    engine: Engine, client: httpx.AsyncClient, options: Options, progress: Progress
) -> None:
    task = progress.add_task(f"starting {engine.spec.name}", total=1)
    await engine.ready(client, options.startup_timeout_s)
    progress.update(task, completed=1, description=f"{engine.spec.name} is ready")


def _progress(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        SpinnerColumn(finished_text="*"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


async def _require_kvpatch_as_asked(client: httpx.AsyncClient, engines: Sequence[Engine]) -> None:
    """A run that says ``kvpatch`` must have had it, and one that says ``stock`` must not."""
    for engine in engines:
        for rank, status in enumerate(await engine.rpc(client, "kvpatch_process_status")):
            if status["enabled"] is not engine.spec.kvpatch:
                raise EngineFailed(
                    f"{engine.spec.name}: expected kvpatch "
                    f"{'on' if engine.spec.kvpatch else 'off'} in the worker of rank {rank}, "
                    f"found {status}; is kvpatch named in VLLM_PLUGINS where that is set?"
                )


async def _vocabulary(client: httpx.AsyncClient, engine: Engine) -> list[int]:
    """Ordinary token ids of the engine's model, whatever its tokenizer."""
    response = await client.post(
        f"{engine.url}/tokenize",
        json={
            "model": engine.spec.model,
            "prompt": " ".join(words(_VOCABULARY_WORDS, seed=1)),
            "add_special_tokens": False,
        },
        timeout=60.0,
    )
    if response.status_code != 200:
        raise EngineFailed(
            f"{engine.url}/tokenize: HTTP {response.status_code}: {response.text[:500]}"
        )
    tokens: list[int] = response.json()["tokens"]
    return tokens


@dataclass(frozen=True)
class _SetupRun:
    """All prompts through one set-up's running engines."""

    setup: Setup
    engines: Sequence[Engine]
    client: httpx.AsyncClient
    options: Options
    console: Console

    async def observe(self, cases: Sequence[Case]) -> dict[str, Observation]:
        """Send every prompt; the spoiled ones last."""
        prefill, *decode = self.engines
        await prefill.rpc(self.client, "kvpatch_watch", PREFILLED)
        for engine in decode:
            await engine.rpc(self.client, "kvpatch_watch", LOADED)
        await self._warm_up(cases)
        observations: dict[str, Observation] = {}
        controls = [case for case in cases if case.control and self.options.negative_control]
        ordinary = [case for case in cases if not case.control]
        with _progress(self.console) as progress:
            task = progress.add_task(
                f"{self.setup.name}: prompts", total=len(ordinary) + len(controls)
            )
            for step in (*steps(ordinary), *steps(controls)):
                for engine in decode:
                    await engine.rpc(
                        self.client, "kvpatch_corrupt", "true" if step[0].control else "false"
                    )
                request_ids = {case.name: f"kvpatch{uuid.uuid4().hex}" for case in step}
                answers = await asyncio.gather(
                    *(self._answer(case, request_ids[case.name]) for case in step)
                )
                snapshots = [await self._snapshots(engine) for engine in self.engines]
                for case, answer in zip(step, answers, strict=True):
                    found = [_find(by_request, request_ids[case.name]) for by_request in snapshots]
                    observations[case.name] = replace(
                        answer, prefill=found[0], decode=found[1] if len(found) > 1 else None
                    )
                progress.advance(task, len(step))
        return observations

    async def _warm_up(self, cases: Sequence[Case]) -> None:
        """Let a pair meet before the prompts that count.

        The first request makes the two engines shake hands, for which vLLM allows five seconds. A
        machine on which engines have just started may be too busy for that; a pair that can never
        shake hands fails on every prompt that follows.
        """
        token_ids = cases[0].token_ids * _WARM_UP_TOKENS
        for _ in range(_WARM_UP_TRIES):
            case = Case("warm-up", token_ids, step=-1)
            answer = await self._answer(case, f"kvpatch{uuid.uuid4().hex}")
            for engine in self.engines:
                await self._snapshots(engine)
            if answer.completion is not None:
                return

    async def _answer(self, case: Case, request_id: str) -> Observation:
        import httpx

        prefill, *decode = self.engines
        model, tokens = prefill.spec.model, self.options.max_tokens
        try:
            if decode:
                completion = await prefill_then_decode(
                    self.client,
                    prefill.url,
                    decode[0].url,
                    model,
                    case.token_ids,
                    tokens,
                    request_id,
                )
            else:
                completion = await complete(
                    self.client, prefill.url, model, case.token_ids, tokens, request_id
                )
        except (RequestFailed, httpx.TransportError) as error:
            for engine in self.engines:
                engine.require_alive()
            return Observation(None, error=str(error) or repr(error))
        return Observation(completion)

    async def _snapshots(self, engine: Engine) -> dict[str, Snapshot]:
        """Request id -> snapshot, of what the engine noted since the last call."""
        ranks = await engine.rpc(self.client, "kvpatch_records")
        by_request: dict[str, list[dict[str, Any]]] = {}
        for records in ranks:
            for record in records:
                by_request.setdefault(record["request"], []).append(record)
        return {
            request: Snapshot(
                join_ranks([record["layers"] for record in records]),
                min(record["computed_tokens"] for record in records),
            )
            for request, records in by_request.items()
        }


def _find(snapshots: dict[str, Snapshot], request_id: str) -> Snapshot | None:
    """The engine puts a prefix and suffixes around the id that it was given."""
    for name, snapshot in snapshots.items():
        if request_id in name:
            return snapshot
    return None
