"""Holds engines up, kills them, and reads their counts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvpatch.core.errors import EngineFailed

if TYPE_CHECKING:
    import httpx

    from kvpatch.tools.verify.engine import Engine

ENDED = "vllm:request_success_total"
"""How requests have ended, by ``finished_reason``."""


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """While inside, no process of the engine runs; what is sent to it waits."""
    _signal(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(EngineFailed):  # it was killed meanwhile
            _signal(engine, signal.SIGCONT)


async def kill(engine: Engine) -> None:
    """kill -9 of all of an engine's processes."""
    with suppress(EngineFailed):  # it has ended by itself
        _signal(engine, signal.SIGKILL)
    await asyncio.to_thread(engine.stop)  # reaps it


async def count(client: httpx.AsyncClient, engine: Engine, name: str, **labels: str) -> int:
    """A counter of an engine's ``/metrics``; 0 where it has not counted yet."""
    from prometheus_client.parser import text_string_to_metric_families

    response = await client.get(f"{engine.url}/metrics", timeout=60.0)
    response.raise_for_status()
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _signal(engine: Engine, number: signal.Signals) -> None:
    """To all of an engine's processes.

    Raises:
        EngineFailed: it has none.
    """
    if engine.group is None:
        raise EngineFailed(f"{engine.spec.name} does not run")
    try:
        os.killpg(engine.group, number)
    except ProcessLookupError:
        raise EngineFailed(f"{engine.spec.name} has no process left") from None
