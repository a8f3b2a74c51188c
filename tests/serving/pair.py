"""A pair of real engines that a test talks to, with prompts that share nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvpatch.tools.verify.engine import Engine, EngineSpec, Options
from kvpatch.tools.verify.handoff import Request, complete, prefill
from kvpatch.tools.verify.run import require_kvpatch_as_asked, running, vocabulary

if TYPE_CHECKING:
    import httpx

ANSWER_TOKENS = 12


class Pair:
    """P and D, and who asks them."""

    def __init__(self, client: httpx.AsyncClient, engines: list[Engine], words: list[int]) -> None:
        self.client, self._words = client, words
        self.prefill, self.decode = engines
        self._prompts, self._requests = itertools.count(), itertools.count()

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """A prompt whose first token no other has."""
        at = next(self._prompts) % len(self._words)
        return tuple((2 * (self._words[at:] + self._words[:at]))[:tokens])

    def request(self, prompt: tuple[int, ...], *, is_fresh: bool = False) -> Request:
        """A request of its own; a fresh one finds nothing in a prefix cache."""
        name = f"request-{next(self._requests)}"
        return Request(self.prefill.spec.model, prompt, name, cache_salt=name if is_fresh else "")

    async def answer(
        self, engine: Engine, request: Request, params: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """The tokens of an answer."""
        found = await complete(self.client, engine.url, request, ANSWER_TOKENS, params)
        return found.token_ids

    async def prefilled(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        """P's parameters for a prompt."""
        return await prefill(self.client, self.prefill.url, self.request(prompt))

    async def post(self, engine: Engine, body: Mapping[str, Any]) -> httpx.Response:
        """An engine's answer to any JSON."""
        return await self.client.post(
            f"{engine.url}/v1/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
            timeout=300,
        )


@asynccontextmanager
async def running_pair(options: Options, specs: Sequence[EngineSpec]) -> AsyncIterator[Pair]:
    """Starts P and D, each with or without kvpatch as its spec says."""
    import httpx
    from rich.console import Console

    async with (
        httpx.AsyncClient(trust_env=False) as client,
        running(specs, client, options, Console(quiet=True)) as engines,
    ):
        await require_kvpatch_as_asked(client, engines)
        yield Pair(client, engines, await vocabulary(client, engines[0]))
