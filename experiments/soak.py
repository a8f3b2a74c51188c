"""Sends many requests through host buffers on P and D; experiments/soak.sh runs this.

P and D have blocks of 64 and 32 tokens, and host buffers with room for about four requests. Some
clients give up while P computes, after P's answer, or while D answers. In the middle P is killed,
another P takes its place, and what was under way is asked again.

The last line of P's log about host blocks must say that none is in use, after others that say that
some are. D's metrics must say that nothing is taken of its staging pool.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from experiments.engines.faults import count
from experiments.engines.routed import (
    Outcome,
    Play,
    Prompt,
    answers_alone,
    half,
    options_for,
    playing,
)
from experiments.harness import console_of, options_of
from kvpatch.observe.catalogue import POOL_BYTES, POOL_USED_BYTES
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import Engine, EngineSpec, Options
from kvpatch.tools.verify.run import until_signal

LEASE_S = 15
STAGING_S = 150
#: Of P's blocks of 64 tokens: 4 layers, 2 heads and keys, 4 heads of 32 channels of 4 bytes.
HOST_BLOCK_BYTES = 64 * 4 * 2 * 4 * 32 * 4
#: The null block's, and as many as the longest prompt of the model needs.
HOST_BLOCKS = 1 + 16
CACHE_TOKENS = 16384
LONGEST = 260
TRIES = 4
#: All that P's log says of host blocks in use: reserved, filled, and waiting requests.
HOST_BLOCKS_SAID = re.compile(
    r"host buffer: (\d+) of \d+ blocks reserved, (\d+) of them filled; (\d+) requests wait"
)
SAMPLE_S = 10
#: Engines grow a little whatever runs in them; host blocks left behind each time would be far more.
GROWTH_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Sample:
    """The memory of both engines, and how often P had restarted by then."""

    restarts: int
    prefill_bytes: int
    decode_bytes: int


def engine(name: str, options: Options, block_tokens: int) -> EngineSpec:
    """P or D, with a cache that the soak fills many times over."""
    settings = (
        ("KVPATCH_HOST_BUFFER", "always"),
        ("KVPATCH_HOST_BUFFER_BYTES", str(HOST_BLOCKS * HOST_BLOCK_BYTES)),
        # oneDNN keeps what it has made for each length of a prompt (1,024 of them, some 0.4 MiB
        # each): no growth of ours.
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8"),
    )
    return half(name, options, block_tokens, CACHE_TOKENS, True, settings, lease_s=LEASE_S)


def draw(
    chance: random.Random, words: list[int], prefixes: list[tuple[int, ...]]
) -> tuple[int, ...]:
    """Draws a prompt; some share one of the prefixes, which are drawn first."""
    while len(prefixes) < 40:
        prefixes.append(tuple(chance.choices(words, k=chance.randint(32, 130))))
    begin = chance.choice(prefixes) if chance.random() < 0.2 else ()
    return (*begin, *chance.choices(words, k=chance.randint(2, LONGEST - len(begin))))


@dataclass
class Soak:
    """The pair, and all requests through it.

    Attributes:
        ends: how many requests ended how.
        failures: the wrong answers too.
    """

    play: Play
    console: Console
    prompts: list[Prompt]
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)
    restarts: int = 0
    sent: int = 0
    under_way: int = 0
    started: float = field(default_factory=time.monotonic)
    _is_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, together: int, seconds: float) -> None:
        """All prompts that the time allows, so many at once; P restarts in the middle."""
        queue = list(enumerate(self.prompts))
        queue.reverse()
        total, chance = len(queue), random.Random(5)
        self._is_up.set()

        def passed() -> float:
            return max((total - len(queue)) / total, (time.monotonic() - self.started) / seconds)

        async def connection() -> None:
            while queue and passed() < 1.0:
                number, prompt = queue.pop()
                self.sent += 1
                if passed() >= 0.5 and not self.restarts:
                    await self.restart()
                await self._is_up.wait()
                await self.serve(number, prompt, chance)

        async def keep_sampling() -> None:
            while True:
                await asyncio.sleep(SAMPLE_S)
                if self._is_up.is_set():
                    self.sample()

        self.sample()
        sampling = asyncio.create_task(keep_sampling())
        try:
            await asyncio.gather(*(connection() for _ in range(together)))
        finally:
            sampling.cancel()
        self.sample()

    async def restart(self) -> None:
        """Kills P whatever it is doing, and starts another in its place."""
        self._is_up.clear()
        self.restarts += 1
        self.console.print(f"P restarts, {self.under_way} requests under way", highlight=False)
        await self.play.restart(self.play.prefill)
        self._is_up.set()
        self.sample()

    async def serve(self, number: int, prompt: Prompt, chance: random.Random) -> None:
        """One request; what fails because of the restart is asked again."""
        how, patience = chance.random(), chance.uniform(0.0, 0.3)
        for attempt in range(TRIES):
            restarts = self.restarts
            self.under_way += 1
            end = await self.ask(prompt, how, patience)
            self.under_way -= 1
            is_failed = isinstance(end, Outcome) and not end.is_answered
            if is_failed and self.restarts > restarts and attempt + 1 < TRIES:
                self.ends["asked again because P restarted"] += 1
                await self._is_up.wait()
                continue
            self.ends[end.kind if isinstance(end, Outcome) else end] += 1
            if isinstance(end, Outcome) and end.kind != "right":
                tokens = len(prompt.token_ids)
                self.failures.append(f"{number}, {tokens} tokens: {end.kind} {end.said}")
            return

    async def ask(self, prompt: Prompt, how: float, patience: float) -> Outcome | str:
        """Sends one request; returns its end, or what the client did instead of waiting for it."""
        if 0.08 <= how < 0.12:
            found = await self.play.at_p(prompt, f"kvpatch{uuid.uuid4().hex}")
            return found if isinstance(found, Outcome) else "given up after P"
        if how >= 0.2:
            return await self.play.through(prompt)
        patience = patience if how < 0.08 else 0.2 + 3 * patience
        try:
            found = await asyncio.wait_for(self.play.through(prompt), patience)
        except asyncio.TimeoutError:
            return "given up at once" if how < 0.08 else "given up later"
        return "answered before the client gave up" if found.is_answered else found

    def sample(self) -> None:
        """How much memory both engines take now, with what has become of requests."""
        both = (self.play.prefill, self.play.decode)
        found = Sample(self.restarts, *map(resident, both))
        self.memory.append(found)
        self.console.print(
            f"{time.monotonic() - self.started:.0f} s, {self.sent} requests: "
            f"P {mib(found.prefill_bytes)}, D {mib(found.decode_bytes)}; {dict(self.ends)}",
            highlight=False,
            soft_wrap=True,
        )

    async def host_blocks_left(self) -> tuple[int, ...] | None:
        """Returns what P's log says last of them, after steps in which P can give them back."""
        end = time.monotonic() + 2 * LEASE_S
        while True:
            log = self.play.prefill.log.read_text(errors="replace")
            said = [tuple(map(int, found)) for found in HOST_BLOCKS_SAID.findall(log)]
            if (said and not any(said[-1])) or time.monotonic() > end:
                return said[-1] if any(any(line) for line in said) else None
            await self.play.others()
            await asyncio.sleep(0.5)

    async def staging_bytes(self) -> int | None:
        """Returns the bytes that stay taken of D's staging pool, by its metrics; None without one.

        Reads from a P that was killed may still write to theirs, and keep it for two minutes.
        """
        end = time.monotonic() + STAGING_S
        while True:
            await self.play.served(self.prompts[0])
            await asyncio.sleep(2)
            pool, taken = [
                await count(self.play.client, self.play.decode, gauge.shown_name)
                for gauge in (POOL_BYTES, POOL_USED_BYTES)
            ]
            if (pool and not taken) or time.monotonic() > end:
                return taken if pool else None

    def growth(self) -> tuple[int, int]:
        """Returns the growth of P and D in the second half after the last restart.

        Before, what any engine needs for lengths of prompts that it has not met comes in.
        """
        since = [one for one in self.memory if one.restarts == self.memory[-1].restarts]
        start, last = since[len(since) // 2], since[-1]
        return last.prefill_bytes - start.prefill_bytes, last.decode_bytes - start.decode_bytes


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


async def soak(asked: argparse.Namespace, console: Console) -> bool:
    """Plays the soak; true if all went well."""
    options = options_for(asked.work_dir, "soak", console)
    words, prompts = await answers_alone(
        "soak-single",
        CACHE_TOKENS // 32,
        asked.requests,
        options,
        console,
        partial(draw, prefixes=[]),
    )
    pair = (engine("soak-prefill", options, 64), engine("soak-decode", options, 32))
    async with playing(pair, words, options, console) as play:
        run = Soak(play, console, prompts)
        await run.run(asked.connections, asked.seconds)
        for line in (*(f"{end}: {times}" for end, times in run.ends.items()), *run.failures[:20]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return await verdict(run)


async def verdict(run: Soak) -> bool:
    """True if every answer was right and nothing is left; shows growth beside it."""
    grown, console = run.growth(), run.console
    console.print(f"growth since the middle: P {mib(grown[0])}, D {mib(grown[1])}")
    left, staging = await run.host_blocks_left(), await run.staging_bytes()
    console.print(
        f"staging bytes taken at D: {staging}; "
        f"host blocks at P, reserved, filled and waited for: {left}",
        highlight=False,
        soft_wrap=True,
    )
    return (
        not run.failures
        and run.ends["right"] > run.sent // 2
        and run.restarts == 1
        and staging == 0
        and left is not None
        and not any(left)
        and all(size <= GROWTH_BYTES for size in grown)
    )


def main() -> None:
    options = options_of(
        __doc__,
        judged=False,
        requests=(2000, "prompts"),
        connections=(16, "requests at once"),
        seconds=(3600.0, "send no more after that"),
        work_dir=(None, "for logs and the model; kept"),
    )
    console = console_of(132)
    with exit_statuses():
        passed = until_signal(soak(options, console))
    console.print("passed" if passed else "FAILED")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
