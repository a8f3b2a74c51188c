"""Plays faults while requests are at P, on their way, or at D.

The lease of P is :data:`LEASE_S`; heartbeats of a D that is held up do not renew it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack

from experiments.engines.faults import held
from experiments.engines.routed import TOGETHER, Play, Prompt, Told, batches, settled
from kvpatch.tools.verify.engine import Engine

LEASE_S = 2
HELD_S = 5.0
_REQUESTS_PER_KILL = 200


async def stale(play: Play, prompts: Sequence[Prompt], told: Told) -> None:
    """D is held up past the lease, and P's blocks are others' when it reads."""
    for batch in batches(prompts):
        with held(play.decode):
            asked = await play.asked(batch)
            answered = time.monotonic()
            await asyncio.sleep(LEASE_S + 0.3)
            await play.others()
            await asyncio.sleep(max(0.0, answered + HELD_S - time.monotonic()))
        for outcome in await settled(asked):
            told(outcome)


async def link(play: Play, prompts: Sequence[Prompt], told: Told) -> None:
    """P is held up as D reads; it goes on with other prompts and leases that have ended."""
    for batch in batches(prompts):
        with ExitStack() as p_is_held:
            with held(play.decode):
                asked = await play.asked(batch)
                p_is_held.enter_context(held(play.prefill))
            others = asyncio.create_task(play.others())
            await asyncio.sleep(HELD_S)
        outcomes = await settled(asked)
        await others
        for outcome in outcomes:
            told(outcome)


async def replaced(play: Play, prompts: Sequence[Prompt], told: Told) -> None:
    """D reads, by the answers of a P that was killed, from the one in its place."""
    for start in range(0, len(prompts), _REQUESTS_PER_KILL):
        kill = prompts[start : start + _REQUESTS_PER_KILL]
        first, after = kill[:TOGETHER], kill[TOGETHER:]
        with held(play.decode):
            asked = await play.asked(first)
            await play.restart(play.prefill)
            await play.others()
        for outcome in await settled(asked):
            told(outcome)
        for batch in batches(after):
            for outcome in await asyncio.gather(*map(play.served, batch)):
                told(outcome)


async def killed(play: Play, prompts: Sequence[Prompt], told: Told, victim: Engine) -> None:
    """kill -9 in the middle of each lot of requests; clients wait until another one is there."""
    for start in range(0, len(prompts), _REQUESTS_PER_KILL):
        await kill_among(play, prompts[start : start + _REQUESTS_PER_KILL], told, victim)


async def kill_among(play: Play, prompts: Sequence[Prompt], told: Told, victim: Engine) -> None:
    """One kill, a third through."""
    queue = list(reversed(prompts))
    is_up = asyncio.Event()
    is_up.set()
    restarted: list[asyncio.Task[None]] = []

    async def restart() -> None:
        is_up.clear()
        # Within what a request takes, so that some are at P, some on their way and some at D.
        await asyncio.sleep(play.chance.uniform(0.0, 0.05))
        try:
            await play.restart(victim)
        finally:
            is_up.set()

    async def connection() -> None:
        while queue:
            if not restarted and len(queue) <= 2 * len(prompts) // 3:
                restarted.append(asyncio.create_task(restart()))
            else:
                await is_up.wait()
            if queue:
                told(await play.served(queue.pop()))

    await asyncio.gather(*(connection() for _ in range(TOGETHER)))
    await asyncio.gather(*restarted)


SCENES: Mapping[str, Callable[[Play, Sequence[Prompt], Told], Awaitable[None]]] = {
    "stale": stale,
    "link": link,
    "replaced": replaced,
    "kill-p": lambda play, prompts, told: killed(play, prompts, told, play.prefill),
    "kill-d": lambda play, prompts, told: killed(play, prompts, told, play.decode),
}
