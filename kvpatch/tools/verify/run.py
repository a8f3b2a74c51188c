"""The whole run: each set-up in turn, then the comparison."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvpatch.core.errors import Interrupted
from kvpatch.tools.verify.compare import Observation, SetupComparison, compare
from kvpatch.tools.verify.engine import require_environment
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.observe import Serving
from kvpatch.tools.verify.prompts import Case, build_cases
from kvpatch.tools.verify.running import require_kvpatch_as_asked, running, vocabulary
from kvpatch.tools.verify.setups import Options, build_setups

if TYPE_CHECKING:
    from rich.console import Console

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


def _model(options: Options, console: Console) -> str:
    if options.model is not None:
        return options.model
    with console.status("making a tiny random model"):
        return str(make_tiny_llama(options.work_dir / "model"))
