"""The whole run: each set-up's engines in turn, asked all prompts; then the comparison."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvpatch.core.errors import EngineFailed, Interrupted, RequestFailed
from kvpatch.tools.verify.compare import Observation, SetupComparison, Snapshot, compare, join_ranks
from kvpatch.tools.verify.engine import (
    Engine,
    EngineSpec,
    Options,
    build_setups,
    require_comparable,
    require_environment,
    require_release,
    stop_all,
)
from kvpatch.tools.verify.handoff import Request, complete, prefill_then_decode
from kvpatch.tools.verify.model import Case, build_cases, make_tiny_llama, steps, words
from kvpatch.tools.verify.probe import LOADED, PREFILLED

if TYPE_CHECKING:
    import httpx
    from rich.console import Console
    from rich.progress import Progress


_VOCABULARY_WORDS = 200


@asynccontextmanager
async def running(
    specs: Sequence[EngineSpec], client: httpx.AsyncClient, options: Options, console: Console
) -> AsyncIterator[list[Engine]]:
    """The engines, started side by side and ready; stopped on the way out, whatever happens."""
    engines = [Engine(spec, options.work_dir / f"{spec.name}.log") for spec in specs]

    async def ready(engine: Engine, progress: Progress) -> None:
        task = progress.add_task(f"starting {engine.spec.name}", total=1)
        await engine.ready(client, options.startup_timeout)
        progress.update(task, completed=1, description=f"{engine.spec.name} is ready")

    try:
        with progress_bar(console) as progress:
            for engine in engines:
                engine.start()
            await asyncio.gather(*(ready(engine, progress) for engine in engines))
        yield engines
    finally:
        stop_all(engines)


def progress_bar(console: Console) -> Progress:
    from rich import progress

    return progress.Progress(
        progress.SpinnerColumn(finished_text="*"),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console,
    )


async def require_kvpatch_as_asked(client: httpx.AsyncClient, engines: Sequence[Engine]) -> None:
    """A run that says ``kvpatch`` must have had it, and one that says ``stock`` must not."""
    for engine in engines:
        for rank, status in enumerate(await engine.rpc(client, "kvpatch_process_status")):
            if status["enabled"] is not engine.spec.kvpatch:
                raise EngineFailed(
                    f"{engine.spec.name}: expected kvpatch "
                    f"{'on' if engine.spec.kvpatch else 'off'} in the worker of rank {rank}, "
                    f"found {status}; is kvpatch named in VLLM_PLUGINS where that is set?"
                )


async def vocabulary(client: httpx.AsyncClient, engine: Engine) -> list[int]:
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


_WARM_UP_TOKENS = 9
_WARM_UP_TRIES = 3


@dataclass(frozen=True)
class Serving:
    """One set-up's running engines: one engine alone, or any number of P and D."""

    name: str
    prefill: Sequence[Engine]
    decode: Sequence[Engine]
    client: httpx.AsyncClient
    options: Options
    console: Console

    async def observe(self, cases: Sequence[Case]) -> dict[str, Observation]:
        """Send every prompt; the spoiled ones last."""
        for engines, moment in ((self.prefill, PREFILLED), (self.decode, LOADED)):
            for engine in engines:
                await engine.rpc(self.client, "kvpatch_watch", moment)
        await self._warm_up(cases)
        numbers = {case.name: number for number, case in enumerate(cases)}
        observations: dict[str, Observation] = {}
        controls = [case for case in cases if case.control and self.options.negative_control]
        ordinary = [case for case in cases if not case.control]
        with progress_bar(self.console) as progress:
            task = progress.add_task(f"{self.name}: prompts", total=len(ordinary) + len(controls))
            for step in (*steps(ordinary), *steps(controls)):
                for engine in self.decode:
                    spoil = "true" if step[0].control else "false"
                    await engine.rpc(self.client, "kvpatch_corrupt", spoil)
                observations |= await self._step(step, numbers)
                progress.advance(task, len(step))
        return observations

    async def _step(self, step: Sequence[Case], numbers: dict[str, int]) -> dict[str, Observation]:
        """The cases of one step, sent together."""
        routes = [self._route(numbers[case.name]) for case in step]
        request_ids = [f"kvpatch{uuid.uuid4().hex}" for _ in step]
        answers = await asyncio.gather(
            *(
                self._answer(case, request_id, *engines)
                for case, request_id, engines in zip(step, request_ids, routes, strict=True)
            )
        )
        noted = {id(engine): await self._snapshots(engine) for engine in self._engines}
        return {
            case.name: replace(
                answer,
                prefill=_find(noted[id(prefill)], request_id),
                decode=_find(noted[id(decode)], request_id) if decode else None,
            )
            for case, answer, request_id, (prefill, decode) in zip(
                step, answers, request_ids, routes, strict=True
            )
        }

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return (*self.prefill, *self.decode)

    def _route(self, number: int) -> tuple[Engine, Engine | None]:
        """Returns the engines of a case.

        Neighbours go to different P and, until each has had one, to one D, so that prompts with a
        shared prefix meet there.
        """
        count = len(self.prefill)
        decode = self.decode[number // count % len(self.decode)] if self.decode else None
        return self.prefill[number % count], decode

    async def _warm_up(self, cases: Sequence[Case]) -> None:
        """Let every pair meet before the prompts that count.

        The first request makes two engines shake hands, for which vLLM allows five seconds. A
        machine on which engines have just started may be too busy for that; a pair that can never
        shake hands fails on every prompt that follows.
        """
        case = Case("warm-up", cases[0].token_ids * _WARM_UP_TOKENS, step=-1)
        for number in range(len(self.prefill) * max(1, len(self.decode))):
            for _ in range(_WARM_UP_TRIES):
                request_id = f"kvpatch{uuid.uuid4().hex}"
                answer = await self._answer(case, request_id, *self._route(number))
                if answer.completion is not None:
                    break
        for engine in self._engines:
            await self._snapshots(engine)

    async def _answer(
        self, case: Case, request_id: str, prefill: Engine, decode: Engine | None
    ) -> Observation:
        import httpx

        request = Request(prefill.spec.model, case.token_ids, request_id)
        client, tokens = self.client, self.options.max_tokens
        try:
            if decode is None:
                return Observation(await complete(client, prefill.url, request, tokens))
            urls = prefill.url, decode.url
            return Observation(await prefill_then_decode(client, *urls, request, tokens))
        except (RequestFailed, httpx.TransportError) as error:
            for engine in self._engines:
                engine.require_alive()
            return Observation(None, error=str(error) or repr(error))

    async def _snapshots(self, engine: Engine) -> dict[str, Snapshot]:
        """Request id -> snapshot, of what the engine noted since the last call."""
        by_request: dict[str, list[dict[str, Any]]] = {}
        for records in await engine.rpc(self.client, "kvpatch_records"):
            for record in records:
                by_request.setdefault(record["request"], []).append(record)
        return {
            request: Snapshot(
                join_ranks([record["layers"] for record in records]),
                min(record["computed_tokens"] for record in records),
                tuple(tuple(blocks) for blocks in records[0]["block_ids"]),
            )
            for request, records in by_request.items()
        }


def _find(snapshots: dict[str, Snapshot], request_id: str) -> Snapshot | None:
    """The engine puts a prefix and suffixes around the id that it was given."""
    return next((found for name, found in snapshots.items() if request_id in name), None)


T = TypeVar("T")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


async def verify(options: Options, console: Console) -> SetupComparison:
    """Run every set-up that ``options`` ask for, and compare.

    Raises:
        BadOptions: no run can be made of them.
        EngineFailed: an engine could not be started or observed. Prompts that fail are no error
            but a difference.
    """
    import httpx

    require_release(options.release)
    require_comparable(options)
    require_environment()
    options.work_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with console.status("making a tiny random model"):
        model = options.model or str(make_tiny_llama(options.work_dir / "model"))
    setups = build_setups(options, model)
    cases: tuple[Case, ...] = ()
    observations: dict[str, dict[str, Observation]] = {}
    async with httpx.AsyncClient(trust_env=False) as client:
        for setup in setups:
            async with running(setup.specs, client, options, console) as engines:
                await require_kvpatch_as_asked(client, engines)
                if not cases:
                    cases = build_cases(await vocabulary(client, engines[0]))
                split = len(setup.prefill)
                serving = Serving(
                    setup.name, engines[:split], engines[split:], client, options, console
                )
                observations[setup.name] = await serving.observe(cases)
    return compare(cases, observations)
