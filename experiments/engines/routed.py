"""Requests through P and D as a router sends them, each judged by a single engine's answer.

A prompt is taken only if the single engine prefers each token of its answer by a margin, so that
another rounding in a batch of another size cannot change it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from experiments.engines.faults import kill
from experiments.harness import importable_in_engines, work_folder
from kvpatch.core.errors import EngineFailed, RequestFailed
from kvpatch.tools.verify.engine import (
    TRANSFER_CONFIG,
    Engine,
    EngineSpec,
    Options,
    small_engine,
    stop_all,
)
from kvpatch.tools.verify.handoff import Request, complete, prefill
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import progress_bar, require_kvpatch_as_asked, running, vocabulary

ANSWER_TOKENS = 8
TOGETHER = 8
"""As many as P holds at once beside each other."""

_SHORTEST, _LONGEST = 40, 200
"""Tokens of a prompt whose answer a single engine has given."""

PATIENCE_S = 60.0
"""What clients wait once no fault is in the way; reads that never end are no answer."""

_OTHER_TOKENS, _OTHERS = 900, 3
"""More than a cache of 2,048 tokens has room for."""


_MARGIN = 1e-3
"""In the logarithm of a probability, of float32 that rounds otherwise in another batch."""


@dataclass(frozen=True)
class Prompt:
    """One request and what the single engine answers to it."""

    token_ids: tuple[int, ...]
    answer: tuple[int, ...]


async def reference(
    client: httpx.AsyncClient, single: Engine, tokens: tuple[int, ...], answer_tokens: int
) -> Prompt | None:
    """The single engine's answer; None where it is a close thing."""
    response = await client.post(
        f"{single.url}/v1/completions",
        json={
            "model": single.spec.model,
            "prompt": list(tokens),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
        },
        timeout=300,
    )
    response.raise_for_status()
    choice = response.json()["choices"][0]
    margins = [max(top.values()) - min(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    return Prompt(tokens, tuple(choice["token_ids"])) if min(margins) > _MARGIN else None


KINDS = ("right", "wrong", "failed_at_p", "failed_at_d", "broken_at_p", "broken_at_d", "no_answer")


@dataclass(frozen=True)
class Outcome:
    """The end of one request, and the words of a failure.

    Attributes:
        kind: one of KINDS: ``failed_at_p`` or ``failed_at_d`` where that
            engine said that it has failed, ``broken_at_p`` or ``broken_at_d`` where its connection
            ended without a word.
    """

    prompt: Prompt
    kind: str
    said: str = ""

    @property
    def is_answered(self) -> bool:
        return self.kind in ("right", "wrong")


@dataclass
class Told:
    """Counts the ends of requests, and what failures said."""

    advance: Callable[[], None] = lambda: None
    outcomes: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    failed: list[Prompt] = field(default_factory=list)

    def __call__(self, outcome: Outcome) -> None:
        self.advance()
        self.outcomes[outcome.kind] += 1
        if not outcome.is_answered:
            self.failed.append(outcome.prompt)
            self.said[f"{outcome.kind}: {outcome.said}"] += 1

    def ends(self, requests: int) -> dict[str, Any]:
        """Returns the fields of Ends for so many requests."""
        kinds = {kind: self.outcomes[kind] for kind in KINDS}
        return {"requests": requests, **kinds, "said": dict(self.said)}


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The ends of requests in a row of a table, by KINDS; what failures said, and how often."""

    requests: int
    right: int
    wrong: int
    failed_at_p: int
    failed_at_d: int
    broken_at_p: int
    broken_at_d: int
    no_answer: int
    said: dict[str, int]


@dataclass
class Play:
    """One pair of engines, and requests through it as a router sends them."""

    client: httpx.AsyncClient
    options: Options
    prefill: Engine
    decode: Engine
    words: Sequence[int]
    chance: random.Random = field(default_factory=lambda: random.Random(3))

    @property
    def model(self) -> str:
        return self.prefill.spec.model

    async def at_p(self, prompt: Prompt, name: str) -> dict[str, Any] | Outcome:
        request = Request(self.model, prompt.token_ids, name)
        try:
            return await prefill(self.client, self.prefill.url, request)
        except (RequestFailed, httpx.HTTPError) as error:
            return unanswered(prompt, "p", error)

    async def at_d(self, prompt: Prompt, name: str, params: dict[str, Any]) -> Outcome:
        """D's answer, judged."""
        request = Request(self.model, prompt.token_ids, name)
        try:
            answer = await complete(self.client, self.decode.url, request, ANSWER_TOKENS, params)
        except (RequestFailed, httpx.HTTPError) as error:
            return unanswered(prompt, "d", error)
        return Outcome(prompt, "right" if answer.token_ids == prompt.answer else "wrong")

    async def through(self, prompt: Prompt) -> Outcome:
        """One request from end to end."""
        name = f"drill{uuid.uuid4().hex}"
        params = await self.at_p(prompt, name)
        return params if isinstance(params, Outcome) else await self.at_d(prompt, name, params)

    async def served(self, prompt: Prompt) -> Outcome:
        """The same, by a client whose patience ends."""
        try:
            return await asyncio.wait_for(self.through(prompt), PATIENCE_S)
        except asyncio.TimeoutError:
            return Outcome(prompt, "no_answer")

    async def introduce(self, prompts: Sequence[Prompt], before: str) -> None:
        """Makes the engines known to each other.

        Raises:
            EngineFailed: not all is right, before anything is done to them.
        """
        for prompt in prompts:
            outcome = await self.served(prompt)
            if outcome.kind != "right":
                raise EngineFailed(f"{outcome.kind} before {before}: {outcome.said}")

    async def asked(self, prompts: Sequence[Prompt]) -> list[Asked]:
        """Prompts that P has answered and D is sent, while D is held up."""
        names = [f"drill{uuid.uuid4().hex}" for _ in prompts]
        answers = await asyncio.gather(*map(self.at_p, prompts, names))
        return [
            Asked(prompt, asyncio.create_task(self.finish(prompt, name, answer)))
            for prompt, name, answer in zip(prompts, names, answers, strict=True)
        ]

    async def finish(self, prompt: Prompt, name: str, answer: dict[str, Any] | Outcome) -> Outcome:
        """Sends D what P has answered."""
        return answer if isinstance(answer, Outcome) else await self.at_d(prompt, name, answer)

    async def others(self) -> None:
        """Other prompts for P alone, enough to take every block of its cache."""
        for _ in range(_OTHERS):
            tokens = tuple(self.chance.choices(self.words, k=_OTHER_TOKENS))
            request = Request(self.model, tokens, f"other{uuid.uuid4().hex}")
            # What a client of another router would be told is no matter of the pair's.
            with suppress(RequestFailed, httpx.HTTPError):
                await complete(self.client, self.prefill.url, request, 1)

    async def restart(self, engine: Engine) -> None:
        """kill -9 of all of an engine's processes, and one of the same arguments in its place.

        The log of the one that was killed is kept beside the new one's.
        """
        await kill(engine)
        killed = len(list(engine.log.parent.glob(f"{engine.log.stem}.killed-*.log")))
        engine.log.rename(engine.log.with_name(f"{engine.log.stem}.killed-{killed}.log"))
        engine.start()
        await engine.ready(self.client, self.options.startup_timeout)


@dataclass(frozen=True)
class Asked:
    """A request that D has or will have."""

    prompt: Prompt
    answering: asyncio.Task[Outcome]


async def settled(asked: Sequence[Asked]) -> list[Outcome]:
    """Waits for their ends after the fault; clients' patience starts here."""
    tasks = [one.answering for one in asked]
    _, waiting = await asyncio.wait(tasks, timeout=PATIENCE_S)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [
        Outcome(one.prompt, "no_answer") if one.answering.cancelled() else one.answering.result()
        for one in asked
    ]


def batches(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), TOGETHER):
        yield prompts[start : start + TOGETHER]


def unanswered(prompt: Prompt, side: str, error: Exception) -> Outcome:
    """A request that an engine said has failed, or whose connection ended without its word."""
    how = "failed" if isinstance(error, RequestFailed) else "broken"
    return Outcome(prompt, f"{how}_at_{side}", short(error))


def short(error: Exception) -> str:
    """One line of an error, without what differs from engine to engine."""
    reason = error.reason if isinstance(error, RequestFailed) else str(error)
    text = reason or type(error).__name__
    return text.partition(": ")[2][:120] if text.startswith("http") else text[:120]


def short_prompt(chance: random.Random, words: Sequence[int]) -> tuple[int, ...]:
    """Draws a prompt that begins as no other does."""
    return tuple(chance.choices(words, k=chance.randint(_SHORTEST, _LONGEST)))


def options_for(
    asked: str | None,
    name: str,
    console: Console,
    make: Callable[[Path], Path] = make_tiny_llama,
) -> Options:
    """Makes the folder of a run, with its model, and lets engines import this checkout."""
    importable_in_engines()
    folder = work_folder(asked, name, console)
    return Options(work_dir=folder, model=str(make(folder / "model")))


def half(
    name: str,
    options: Options,
    block_tokens: int,
    cache_tokens: int,
    kvpatch: bool,
    settings: tuple[tuple[str, str], ...] = (),
    *,
    lease_s: int,
    **config: str,
) -> EngineSpec:
    """Describes a P or D for sixteen requests at once; ``config`` is of its transfers."""
    leased = {"kv_connector_extra_config": {"kv_lease_duration": lease_s}}
    arguments = (
        *("--block-size", str(block_tokens), "--max-num-seqs", "16"),
        *("--num-gpu-blocks-override", str(cache_tokens // block_tokens)),
        *("--kv-transfer-config", json.dumps({**TRANSFER_CONFIG, **config, **leased})),
    )
    return small_engine(name, str(options.model), "float32", arguments, True, kvpatch, settings)


@asynccontextmanager
async def playing(
    specs: Sequence[EngineSpec], words: Sequence[int], options: Options, console: Console
) -> AsyncIterator[Play]:
    """Runs P and D; whatever engines the play has in the end are stopped too."""
    # One connection for each request: one kept open that an engine has found idle too long is
    # closed under the next request, which the engine never sees.
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(trust_env=False, limits=limits) as client,
        running(specs, client, options, console) as engines,
    ):
        await require_kvpatch_as_asked(client, engines)
        prefill, decode = engines
        play = Play(client, options, prefill, decode, words)
        try:
            yield play
        finally:
            stop_all((play.prefill, play.decode))


async def answers_alone(
    name: str,
    cache_blocks: int,
    wanted: int,
    options: Options,
    console: Console,
    draw: Callable[[random.Random, list[int]], tuple[int, ...]] = short_prompt,
) -> tuple[list[int], list[Prompt]]:
    """Starts a single engine; returns its vocabulary, and prompts with its answers."""
    # Of this engine and of all that are started behind it: glibc keeps what threads free.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    small = ("--max-num-seqs", "16", "--num-gpu-blocks-override", str(cache_blocks))
    alone = small_engine(name, str(options.model), "float32", small, False, False)
    chance, limit = random.Random(11), asyncio.Semaphore(TOGETHER)
    found: list[Prompt] = []
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        running((alone,), client, options, console) as (single,),
    ):
        words = sorted(set(await vocabulary(client, single)))

        async def ask() -> Prompt | None:
            tokens = draw(chance, words)
            async with limit:
                return await reference(client, single, tokens, ANSWER_TOKENS)

        with progress_bar(console) as progress:
            task = progress.add_task("the single engine's answers", total=wanted)
            while len(found) < wanted:
                more = (ask() for _ in range(min(100, wanted - len(found) + 4)))
                found += [one for one in await asyncio.gather(*more) if one is not None]
                progress.update(task, completed=min(wanted, len(found)))
    return words, found[:wanted]
