"""Wrong bytes come over loads, fault by fault: who notices them, and what becomes of the rest.

Each fault comes over loads of the same prompts. A salt of its own has both engines compute and load
each of them anew.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from experiments.engines.load_faults import FAULTS
from experiments.engines.prompt_tokens import PromptTokens
from experiments.engines.proof_pairs import Played
from experiments.engines.proof_probe import HELD, LANDED, LOADED, NAME, is_other, marked
from experiments.engines.references import Prompt, reference
from kvpatch.core.errors import EngineFailed, RequestFailed
from kvpatch.verify.engine import Engine
from kvpatch.verify.handoff import Request, decode, prefill

TOGETHER = 8
ANSWER_TOKENS = 16
#: Two of the largest blocks lie in front of the last token of the shortest.
LENGTHS = ((130, 255), (256, 511), (512, 900))
MARGINS = {"float32": 1e-3, "bfloat16": 0.1}
#: What the witness learns from, and some more.
WARM_UP = 80
#: Faults of which another prompt of the same length and last token is needed.
TWINS = ("another prompt's load, last token too",)
AT_P = ("whole context stale", "stale block, middle", "one wrong byte")
"""Faults that are played at P too, in blocks that it has digested."""

WITNESSED = {
    "whole context stale": 1.0,
    "stale block, early": 0.96,
    "stale block, middle": 0.61,
    "stale block, late": 0.91,
    "middle block zeroed in a middle layer": 1.0,
    "heads swapped in a middle layer": 1.0,
    "values doubled in a middle layer": 1.0,
    "one token lost and one doubled": 0.09,
    "one key flipped, first layer": 0.2,
    "one key flipped, middle layer": 0.92,
}
"""Shares that the witness noticed as a prototype."""

_PATIENCE_S = 120.0
_DIGESTED_S = 20.0
_POLL_S = 0.02


@dataclass
class Row:
    """One fault's loads of one length with one pair.

    Attributes:
        by: who is to notice it: digests, or, of wrong bytes that come behind them, the witness
            alone, which asks nobody, as on a D whose P has no kvpatch.
        side: at D or at P.
        loads: that the fault came over.
        digest, witness: those that digests, and the witness, spoke up against.
        taken_back: of the witness's, those whose step it has had dropped, as ``enforce`` does.
        failed: of the loads, requests that ended with an error.
        right, wrong: answers that are the single engine's, and others.
        undone_wrong: other answers, though a digest spoke up or the step was dropped.
        missed, missed_wrong: nobody spoke up; and of these the answer was another one.
        not_spoilt: requests that the fault did not come over; none of them counts above.
    """

    pair: str
    by: str
    dtype: str
    model: str
    fault: str
    side: str
    shortest: int
    longest: int
    loads: int = 0
    digest: int = 0
    witness: int = 0
    taken_back: int = 0
    failed: int = 0
    right: int = 0
    wrong: int = 0
    undone_wrong: int = 0
    missed: int = 0
    missed_wrong: int = 0
    not_spoilt: int = 0
    said: dict[str, int] = field(default_factory=dict)
    stage: str = "faults"


class Served(NamedTuple):
    """One request, the number of its length, and what came of it: right, wrong, or failed."""

    name: str
    length: int
    outcome: str
    said: str = ""


class Noticed(NamedTuple):
    """Names of requests: spoilt ones, those that digests and the witness spoke up against, and
    those whose step the witness has had dropped."""

    spoilt: set[str]
    digest: set[str]
    witness: set[str]
    taken_back: set[str]


@dataclass
class Faults:
    """One pair, and loads through it.

    Attributes:
        prompts: by length, those of every fault.
        lengths: some of :data:`LENGTHS`.
    """

    client: httpx.AsyncClient
    played: Played
    prefill: Engine
    decode: Engine
    words: PromptTokens
    prompts: Sequence[Sequence[Prompt]]
    lengths: Sequence[tuple[int, int]] = LENGTHS
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    async def begin(self) -> None:
        """Good loads, which the witness learns from; the first is what others are spoilt with."""
        for engine, side in ((self.prefill, "P"), (self.decode, "D")):
            await engine.rpc(self.client, "kvpatch_faults", side)
        await self.through(is_other(0), self.random_tokens(self.lengths[-1][1] + 1))
        limit = asyncio.Semaphore(TOGETHER)

        async def warm_up() -> None:
            async with limit:
                await self.through("", self.random_tokens(self.chance.randint(*self.lengths[0])))

        await asyncio.gather(*(warm_up() for _ in range(WARM_UP)))
        await self.noticed()

    def random_tokens(self, count: int) -> tuple[int, ...]:
        return self.words.draw(self.chance, count)

    async def through(self, mark: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """What D answers to a request whose name begins so.

        Raises:
            RequestFailed: an engine said that it has failed.
        """
        name = f"{mark}{uuid.uuid4().hex}"
        return await self._answer(Request(self.played.model, tokens, name), _nothing)

    async def _answer(
        self, request: Request, between: Callable[[str], Awaitable[None]]
    ) -> tuple[int, ...]:
        params = await prefill(self.client, self.prefill.url, request)
        await between(request.request_id)
        answer = await decode(self.client, self.decode.url, request, ANSWER_TOKENS, params)
        return answer.token_ids

    async def _spoil_at_p(self, name: str) -> None:
        """Has P's blocks be others once they are digested.

        Raises:
            EngineFailed: they are not, for long.
        """
        for _ in range(int(_DIGESTED_S / _POLL_S)):
            if any(await self.prefill.rpc(self.client, "kvpatch_spoil", name)):
                return
            await asyncio.sleep(_POLL_S)
        raise EngineFailed(f"{self.prefill.spec.name} has not digested {name}")

    async def one(self, fault: str, moment: str, number: int) -> Served:
        """One load that a fault comes over; its number, from 1, draws its places."""
        length = number % len(self.lengths)
        prompt = self.prompts[length][(number - 1) // len(self.lengths)]
        name = f"{marked(fault, moment, number)}{uuid.uuid4().hex}"
        try:
            if fault in TWINS:
                twin = (*self.random_tokens(len(prompt.token_ids) - 1), prompt.token_ids[-1])
                await self.through(is_other(number), twin)
            between = self._spoil_at_p if moment == HELD else _nothing
            salt = f"{fault}, {moment}"
            request = Request(self.played.model, prompt.token_ids, name, salt)
            answer = await asyncio.wait_for(self._answer(request, between), _PATIENCE_S)
        except (RequestFailed, httpx.HTTPError, asyncio.TimeoutError) as error:
            said = f"{type(error).__name__}: {str(error).partition(': ')[2]}"
            return Served(name, length, "failed", said[:120])
        return Served(name, length, "right" if answer == prompt.answer else "wrong")

    async def all_of(
        self, fault: str, moment: str, each: int, advance: Callable[[], None]
    ) -> list[Row]:
        """So many loads of one fault; a row for each length."""
        queue, served = list(range(1, each + 1)), list[Served]()

        async def connection() -> None:
            while queue:
                served.append(await self.one(fault, moment, queue.pop()))
                advance()

        await asyncio.gather(*(connection() for _ in range(TOGETHER)))
        noticed = await self.noticed()
        of = self.played
        by, side = ("witness" if moment == LOADED else "digests"), ("P" if moment == HELD else "D")
        heads = (of.pair.name, by, of.dtype, of.model, fault, side)
        return [
            row_of(Row(*heads, *lengths), [one for one in served if one.length == n], noticed)
            for n, lengths in enumerate(self.lengths)
        ]

    async def noticed(self) -> Noticed:
        """Since the last time."""
        found = Noticed(set(), set(), set(), set())
        for engine in (self.prefill, self.decode):
            for rank in await engine.rpc(self.client, "kvpatch_noticed"):
                for name, kept in found._asdict().items():
                    kept |= {mark[0] for one in rank[name] if (mark := NAME.search(one))}
        return found


async def _nothing(name: str) -> None:
    """Between P's answer and D's request."""


def row_of(row: Row, served: Sequence[Served], noticed: Noticed) -> Row:
    """The row with what came of its loads."""
    said: Counter[str] = Counter()
    for one in served:
        if one.name not in noticed.spoilt:
            row.not_spoilt += 1
            said[f"not spoilt, {one.outcome}: {one.said}"] += 1
            continue
        is_noticed = one.name in noticed.digest or one.name in noticed.witness
        row.loads += 1
        row.digest += one.name in noticed.digest
        row.witness += one.name in noticed.witness
        row.taken_back += one.name in noticed.taken_back
        row.failed += one.outcome == "failed"
        row.right += one.outcome == "right"
        row.wrong += one.outcome == "wrong"
        is_undone = one.name in noticed.digest or one.name in noticed.taken_back
        row.undone_wrong += is_undone and one.outcome == "wrong"
        row.missed += not is_noticed
        row.missed_wrong += not is_noticed and one.outcome == "wrong"
        if one.said:
            said[one.said] += 1
    row.said = dict(said)
    return row


class Wanted(NamedTuple):
    """Prompts of each length, and by how much the engine must prefer each token it answers."""

    lengths: Sequence[tuple[int, int]]
    each: int
    margin: float


async def references(
    client: httpx.AsyncClient,
    single: Engine,
    words: PromptTokens,
    wanted: Wanted,
    advance: Callable[[], None],
) -> list[list[Prompt]]:
    """By length prompts that the single engine has no doubt about, none beginning as another."""
    chance, limit = random.Random(23), asyncio.Semaphore(TOGETHER)

    async def ask(lengths: tuple[int, int]) -> Prompt | None:
        tokens = words.draw(chance, chance.randint(*lengths))
        async with limit:
            return await reference(client, single, tokens, ANSWER_TOKENS, wanted.margin)

    found: list[list[Prompt]] = [[] for _ in wanted.lengths]
    for prompts, lengths in zip(found, wanted.lengths, strict=True):
        while len(prompts) < wanted.each:
            count = min(50, wanted.each - len(prompts) + 2)
            batch = await asyncio.gather(*(ask(lengths) for _ in range(count)))
            for prompt in batch:
                if prompt is not None and len(prompts) < wanted.each:
                    prompts.append(prompt)
                    advance()
    return found


def kinds() -> list[tuple[str, str]]:
    """(fault, moment) of all that are played."""
    at_d = [(fault, moment) for moment in (LANDED, LOADED) for fault in FAULTS]
    return at_d + [(fault, HELD) for fault in AT_P]
