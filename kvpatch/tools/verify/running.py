"""Engines that run together: started side by side, checked, and stopped whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvpatch.core.errors import EngineFailed
from kvpatch.tools.verify.engine import Engine, EngineSpec, stop_all
from kvpatch.tools.verify.model import words
from kvpatch.tools.verify.setups import Options

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
    try:
        with progress_bar(console) as progress:
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
