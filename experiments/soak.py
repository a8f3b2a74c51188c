"""Sends many requests through host buffers on P and D; experiments/soak.sh runs this.

P and D have blocks of 64 and 32 tokens, and host buffers with room for about four requests. Some
clients give up while P computes, after P's answer, or while D answers. In the middle another P
takes P's place, and what was under way is asked again.

At the end a prompt needs every host block of P: it is served only if none is left allotted. Then it
is sent once more beside host blocks that were left to a lease, and has to wait for them. The last
line of P's log about host blocks must say that none is in use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from experiments.engines.checkout import importable_in_engines
from experiments.engines.pairs import LAB_PROBE
from experiments.engines.references import Prompt, reference
from experiments.engines.run import forget_prefixes
from experiments.harness import console_of, options_of, telling_refusals, work_folder
from kvpatch.core.errors import LOOK_INTO_LOG, RequestFailed
from kvpatch.tools.verify.engine import TRANSFER_CONFIG, Engine, EngineSpec
from kvpatch.tools.verify.handoff import Completion, prefill_then_decode
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import require_kvpatch_as_asked, running, until_signal, vocabulary
from kvpatch.tools.verify.setups import Options, small_engine

LEASE_S = 15
#: Of P's blocks of 64 tokens: 4 layers, 2 heads and keys, 4 heads of 32 channels of 4 bytes.
HOST_BLOCK_BYTES = 64 * 4 * 2 * 4 * 32 * 4
#: The null block's, and as many as the longest prompt of the model needs.
HOST_BLOCKS = 1 + 16
WHOLE_TOKENS = 1000
CACHE_TOKENS = 16384
ANSWER_TOKENS = 4
LONGEST = 260
TRIES = 4
SAMPLE_S = 10
#: Engines grow a little whatever runs in them; host blocks left behind each time would be far more.
GROWTH_BYTES = 64 * 1024**2


@dataclass
class Tally:
    """Counts the ends of requests, and the engines' memory over time."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """The memory of both engines at one time.

    Attributes:
        seconds: since the first request.
        requests: that were sent by then.
        restarts: of P by then; it has another process after each.
    """

    seconds: float
    requests: int
    restarts: int
    prefill_bytes: int
    decode_bytes: int


def engine(name: str, model: str, block_tokens: int, kvpatch: bool) -> EngineSpec:
    """P, D or the single engine, with a cache that the soak fills many times over."""
    config = {
        **TRANSFER_CONFIG,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    arguments = (
        *LAB_PROBE,
        *("--block-size", str(block_tokens), "--max-num-seqs", "16"),
        *("--num-gpu-blocks-override", str(CACHE_TOKENS // block_tokens)),
    )
    if kvpatch:
        arguments += ("--kv-transfer-config", json.dumps(config))
    settings = (
        ("KVPATCH_HOST_BUFFER", "always"),
        ("KVPATCH_HOST_BUFFER_BYTES", str(HOST_BLOCKS * HOST_BLOCK_BYTES)),
        # Glibc keeps what threads free, and oneDNN what it has made for each length of a prompt
        # (1,024 of them, some 0.4 MiB each): neither is growth of ours.
        ("MALLOC_ARENA_MAX", "2"),
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8"),
    )
    return small_engine(
        name, model, "float32", arguments, kvpatch, kvpatch, settings if kvpatch else ()
    )


@dataclass(frozen=True)
class References:
    """Prompts with the answers of one engine alone, and one prompt that needs every host block."""

    prompts: list[Prompt]
    whole: Prompt


async def references(
    client: httpx.AsyncClient, single: Engine, count: int, console: Console
) -> References:
    """Asks the single engine."""
    ids = sorted(set(await vocabulary(client, single)))
    chance = random.Random(11)
    limit = asyncio.Semaphore(16)
    # Some begin as an earlier one does.
    prefixes = [tuple(chance.choices(ids, k=chance.randint(32, 130))) for _ in range(40)]

    async def ask(tokens: tuple[int, ...]) -> Prompt | None:
        async with limit:
            return await reference(client, single, tokens, ANSWER_TOKENS)

    def draw() -> tuple[int, ...]:
        begin = chance.choice(prefixes) if chance.random() < 0.2 else ()
        return (*begin, *chance.choices(ids, k=chance.randint(2, LONGEST - len(begin))))

    found: list[Prompt] = []
    while len(found) < count:
        batch = await asyncio.gather(
            *(ask(draw()) for _ in range(min(200, count - len(found) + 8)))
        )
        found += [prompt for prompt in batch if prompt is not None]
        console.print(
            f"single engine: {len(found)} of {count} prompts, {resident(single) / 2**20:.0f} MiB",
            highlight=False,
        )
    while (whole := await ask(tuple(chance.choices(ids, k=WHOLE_TOKENS)))) is None:
        pass
    return References(found[:count], whole)


@dataclass
class Soak:
    """The pair, and all requests through it."""

    client: httpx.AsyncClient
    options: Options
    console: Console
    model: str
    prefill: Engine
    decode: Engine
    references: References
    tally: Tally = field(default_factory=Tally)
    restarts: int = 0
    is_down: bool = False
    under_way: int = 0
    sent: int = 0
    started: float = 0.0

    async def run(self, connections: int, seconds: float) -> int:
        """All prompts that the time allows, so many at once; P restarts in the middle."""
        queue = list(enumerate(self.references.prompts))
        queue.reverse()
        total = len(queue)
        chance = random.Random(5)
        self.started = time.monotonic()

        def passed() -> float:
            return max((total - len(queue)) / total, (time.monotonic() - self.started) / seconds)

        async def connection() -> None:
            while queue and passed() < 1.0:
                number, prompt = queue.pop()
                self.sent += 1
                if passed() >= 0.5 and not self.restarts:
                    await self.restart()
                while self.is_down:
                    await asyncio.sleep(0.2)
                await self.serve(number, prompt, chance)

        self.sample()
        sampling = asyncio.create_task(self.keep_sampling())
        try:
            await asyncio.gather(*(connection() for _ in range(connections)))
        finally:
            sampling.cancel()
        self.sample()
        return self.sent

    async def keep_sampling(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if not self.is_down:
                self.sample()

    async def restart(self) -> None:
        """Stops P whatever it is doing, and starts another in its place."""
        self.is_down = True
        self.restarts += 1
        self.console.print(f"P restarts, {self.under_way} requests under way", highlight=False)
        await asyncio.to_thread(self.prefill.stop)
        spec = engine("soak-prefill-again", self.model, 64, True)
        self.prefill = Engine(spec, self.options.work_dir / f"{spec.name}.log")
        self.prefill.start()
        await self.prefill.ready(self.client, self.options.startup_timeout_s)
        self.is_down = False
        self.sample()

    async def serve(self, number: int, prompt: Prompt, chance: random.Random) -> None:
        """One request; what fails because of the restart is asked again."""
        how = chance.random()
        patience = chance.uniform(0.0, 0.3)
        for attempt in range(TRIES):
            restarts = self.restarts
            self.under_way += 1
            try:
                outcome = await self.ask(prompt, how, patience)
            except (RequestFailed, httpx.HTTPError) as error:
                if (self.restarts > restarts or self.is_down) and attempt + 1 < TRIES:
                    self.tally.outcomes["asked again because P restarted"] += 1
                    while self.is_down:
                        await asyncio.sleep(0.2)
                    continue
                if isinstance(error, httpx.TransportError) and attempt + 1 < TRIES:
                    self.tally.outcomes["asked again because a connection was closed"] += 1
                    continue
                self.tally.outcomes["failed"] += 1
                self.tally.failures.append(f"{number}: {error!r}")
                return
            finally:
                self.under_way -= 1
            self.tally.outcomes[outcome] += 1
            if outcome == "wrong":
                self.tally.wrong.append(f"{number}: {len(prompt.token_ids)} tokens")
            return

    async def ask(self, prompt: Prompt, how: float, patience: float) -> str:
        """Sends one request and returns its end."""
        name = f"kvpatch{uuid.uuid4().hex}"
        if 0.08 <= how < 0.12:
            await complete_at_p_alone(self.client, self.prefill.url, self.model, prompt, name)
            return "given up after P"
        answering = self.pass_on(prompt, name)
        if how < 0.08:
            return await self.give_up(answering, patience, "given up at once")
        if how < 0.2:
            return await self.give_up(answering, 0.2 + 3 * patience, "given up later")
        answer = await answering
        return "right" if answer.token_ids == prompt.answer else "wrong"

    async def pass_on(self, prompt: Prompt, name: str) -> Completion:
        """Sends a prompt to P and then to D, as a proxy does."""
        return await prefill_then_decode(
            self.client,
            self.prefill.url,
            self.decode.url,
            self.model,
            prompt.token_ids,
            ANSWER_TOKENS,
            name,
        )

    async def give_up(self, answering: Any, patience: float, what: str) -> str:
        """The client leaves, whoever has the request."""
        try:
            await asyncio.wait_for(answering, patience)
        except asyncio.TimeoutError:
            return what
        return "answered before the client gave up"

    def sample(self) -> None:
        """How much memory both engines take now, with what has become of requests."""
        found = Sample(
            time.monotonic() - self.started,
            self.sent,
            self.restarts,
            resident(self.prefill),
            resident(self.decode),
        )
        self.tally.memory.append(found)
        self.console.print(
            f"{found.seconds:.0f} s, {found.requests} requests: P {mib(found.prefill_bytes)}, "
            f"D {mib(found.decode_bytes)}; {dict(self.tally.outcomes)}",
            highlight=False,
            soft_wrap=True,
        )

    async def seconds_for_all_host_blocks(self) -> float:
        """How long the prompt that needs every host block takes.

        Raises:
            RequestFailed: it is answered wrongly, or not before all leases must have ended.
        """
        started = time.monotonic()
        answering = self.pass_on(self.references.whole, f"kvpatch{uuid.uuid4().hex}")
        try:
            answer = await asyncio.wait_for(answering, 4 * LEASE_S)
        except asyncio.TimeoutError:
            raise RequestFailed(
                "a prompt that needs every host block is not served", LOOK_INTO_LOG
            ) from None
        if answer.token_ids != self.references.whole.answer:
            raise RequestFailed(
                "a prompt that needs every host block is answered wrongly", LOOK_INTO_LOG
            )
        for side in (self.prefill, self.decode):
            await forget_prefixes(side, self.client)
        return time.monotonic() - started

    async def end(self) -> tuple[float, float]:
        """Seconds for all host blocks when nothing holds one, and beside some that are left."""
        await self.seconds_for_all_host_blocks()  # waits for the leases of the clients that left
        alone = await self.seconds_for_all_host_blocks()
        name = f"kvpatch{uuid.uuid4().hex}"
        prompt = self.references.prompts[0]
        await complete_at_p_alone(self.client, self.prefill.url, self.model, prompt, name)
        return alone, await self.seconds_for_all_host_blocks()

    async def host_blocks_left(self) -> HostBlocksSaid | None:
        """Returns what P's log says last of them, after steps in which P can give them back."""
        path = self.options.work_dir / f"{self.prefill.spec.name}.log"
        end = time.monotonic() + 2 * LEASE_S
        while True:
            said = host_blocks_said(path.read_text(errors="replace"))
            if (said and not any(said[-1])) or time.monotonic() > end:
                return said[-1] if any(any(line) for line in said) else None
            prompt = self.references.prompts[0].token_ids[:2]
            await reference(self.client, self.prefill, prompt, ANSWER_TOKENS)
            await asyncio.sleep(0.5)

    async def staging_bytes(self) -> int:
        """Returns the bytes that are taken of D's staging pool."""
        return int((await self.decode.rpc(self.client, "kvpatch_held"))[0]["staging_bytes"])


async def complete_at_p_alone(
    client: httpx.AsyncClient, url: str, model: str, prompt: Prompt, name: str
) -> None:
    """A prompt that P computes for a D that never asks."""
    response = await client.post(
        f"{url}/v1/completions",
        json={
            "model": model,
            "prompt": list(prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        },
        headers={"X-Request-Id": name},
        timeout=300,
    )
    if response.status_code != 200:
        raise RequestFailed(f"{url}: HTTP {response.status_code}", LOOK_INTO_LOG)


class HostBlocksSaid(NamedTuple):
    """A line of P's log."""

    reserved: int
    held: int
    waiting: int


_SAID = re.compile(
    r"host buffer: (\d+) of \d+ blocks reserved, (\d+) of them filled; (\d+) requests wait"
)


def host_blocks_said(log: str) -> list[HostBlocksSaid]:
    """All that a log says of host blocks in use."""
    return [HostBlocksSaid(*map(int, found)) for found in _SAID.findall(log)]


def resident(one: Engine) -> int:
    """Bytes that an engine's processes have of their own, and their share of the rest."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[2]) != one.group:
                continue
            rollup = (status.parent / "smaps_rollup").read_text()
        except OSError:  # it has ended meanwhile
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def growth(tally: Tally) -> tuple[int, int]:
    """Returns the growth of P and D in the second half after the last restart.

    Before, what any engine needs for lengths of prompts that it has not met comes in.
    """
    since = [m for m in tally.memory if m.restarts == tally.memory[-1].restarts]
    start, last = since[len(since) // 2], since[-1]
    return last.prefill_bytes - start.prefill_bytes, last.decode_bytes - start.decode_bytes


def show(run: Soak, served: int, console: Console) -> None:
    """Shows the ends of the requests."""
    tally = run.tally
    console.print(f"{served} requests in {tally.memory[-1].seconds:.0f} s", highlight=False)
    for outcome, count in sorted(tally.outcomes.items()):
        console.print(f"  {count:6d} {outcome}", highlight=False)
    for line in (*tally.wrong[:20], *tally.failures[:20]):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


async def soak(options: argparse.Namespace, console: Console) -> bool:
    """Plays the soak; true if all went well."""
    of_run = Options(work_dir=work_folder(options.work_dir, "soak", console))
    model = str(make_tiny_llama(of_run.work_dir / "model"))
    # Shorter than the servers keep idle connections: one that they close as it is used is an error.
    limits = httpx.Limits(max_connections=64, keepalive_expiry=1)
    async with httpx.AsyncClient(trust_env=False, limits=limits) as client:
        single = engine("soak-single", model, 32, kvpatch=False)
        async with running((single,), client, of_run, console) as (engine_alone,):
            known = await references(client, engine_alone, options.requests, console)
        pair = (
            engine("soak-prefill", model, 64, True),
            engine("soak-decode", model, 32, True),
        )
        async with running(pair, client, of_run, console) as engines:
            await require_kvpatch_as_asked(client, engines)
            run = Soak(client, of_run, console, model, *engines, known)
            try:
                served = await run.run(options.connections, options.seconds)
                show(run, served, console)
                return await verdict(run, served)
            finally:
                run.prefill.stop()  # of the restart, which running() does not know


async def verdict(run: Soak, served: int) -> bool:
    """True if every answer was right and nothing is left; shows growth beside it."""
    tally, console = run.tally, run.console
    passed = (
        not tally.wrong
        and not tally.failures
        and tally.outcomes["right"] > served // 2
        and run.restarts == 1
    )
    grown = growth(tally)
    console.print(f"growth since the middle: P {mib(grown[0])}, D {mib(grown[1])}")
    alone, beside = await run.end()
    left = await run.host_blocks_left()
    staging = await run.staging_bytes()
    console.print(
        f"a prompt that needs every host block: {alone:.1f} s, and {beside:.1f} s beside some that "
        f"were left to a lease of {LEASE_S} s; staging bytes taken at D: {staging}; "
        f"host blocks at P: {left}",
        highlight=False,
        soft_wrap=True,
    )
    return (
        passed
        and beside > max(LEASE_S / 2, 2 * alone)
        and not staging
        and left is not None
        and not any(left)
        and all(bytes_ <= GROWTH_BYTES for bytes_ in grown)
    )


def main() -> None:
    """Plays the soak; exit status 0 if all went well."""
    options = options_of(
        __doc__,
        judged=False,
        requests=(2000, "prompts"),
        connections=(16, "requests at once"),
        seconds=(3600.0, "send no more after that"),
        work_dir=(None, "for logs and the model; kept"),
    )
    console = console_of(132)
    importable_in_engines()
    with telling_refusals():
        passed = until_signal(soak(options, console))
    console.print("passed" if passed else "FAILED")
    sys.exit(not passed)


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    main()
