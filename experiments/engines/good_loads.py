"""Good loads by the thousand through a pair, and what its instruments have said of them."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from experiments.engines.prompt_tokens import PromptTokens
from experiments.engines.proof_pairs import Played
from experiments.engines.references import reference
from kvpatch.core.errors import RequestFailed
from kvpatch.verify.engine import Engine
from kvpatch.verify.handoff import Completion, prefill_then_decode

TOGETHER = 8
ANSWER_TOKENS = 4
SHORTEST, LONGEST = 20, 400
#: One in so many is held against the single engine's answer.
SAMPLED_OF = 10
MARGINS = {"float32": 1e-3, "bfloat16": 0.3}
"""By data type by how much an engine must prefer a token that is not to change in another batch."""

_PREFIXES, _SHARED = 40, 0.2
_PATIENCE_S = 120.0
#: A step's counts are in /metrics some time after its answer.
_SETTLE_S = 1.5


@dataclass(frozen=True)
class Asked:
    """One prompt; what a single engine answers where it was asked and had no doubt."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...] | None = None


@dataclass
class Row:
    """What has become of a pair's good loads.

    Attributes:
        requests: that were sent.
        sampled: of these, those that were held against the single engine's answers.
        wrong: of the sampled ones.
        counts: what D's /metrics has counted of loads, by metric and label.
        not_witnessed: by cause.
        farthest_learnt: the largest of the distances that the witness has learnt of good loads.
        failures: what engines or connections said.
    """

    pair: str
    dtype: str
    model: str
    requests: int = 0
    sampled: int = 0
    wrong: int = 0
    failed: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    not_witnessed: dict[str, int] = field(default_factory=dict)
    farthest_learnt: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    stage: str = "good"

    def count(self, metric: str, label: str) -> int:
        """What D has counted of ``kvpatch_METRIC_total``."""
        return self.counts.get(f"{metric} {label}", 0)


def prompts(words: PromptTokens, count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Of 20 to 400 tokens; a fifth of them begin as others do."""
    chance = random.Random(seed)
    prefixes = [words.draw(chance, chance.randint(32, 130)) for _ in range(_PREFIXES)]
    for _ in range(count):
        begin = chance.choice(prefixes) if chance.random() < _SHARED else ()
        tokens = chance.randint(max(SHORTEST, len(begin) + 2), LONGEST)
        yield (*begin, *words.draw(chance, tokens - len(begin)))


async def ask_single(
    client: httpx.AsyncClient,
    single: Engine,
    wanted: Sequence[tuple[int, ...]],
    dtype: str,
    advance: Callable[[], None],
) -> list[Asked]:
    """All prompts; of the sampled ones with the single engine's answers."""
    limit = asyncio.Semaphore(TOGETHER)

    async def ask(number: int, tokens: tuple[int, ...]) -> Asked:
        if number % SAMPLED_OF:
            return Asked(tokens)
        async with limit:
            found = await reference(client, single, tokens, ANSWER_TOKENS, MARGINS[dtype])
        advance()
        return Asked(tokens, None if found is None else found.answer)

    return list(await asyncio.gather(*(ask(n, tokens) for n, tokens in enumerate(wanted))))


async def serve(
    client: httpx.AsyncClient,
    played: Played,
    engines: Sequence[Engine],
    asked: Sequence[Asked],
    advance: Callable[[], None],
    until: float,
) -> Row:
    """Sends them, eight at once, until all are served or the time is over.

    Args:
        until: as ``time.monotonic`` counts.
    """
    prefill, decode = engines
    row = Row(played.pair.name, played.dtype, played.model)
    failures: Counter[str] = Counter()
    queue, started = list(reversed(asked)), time.monotonic()

    async def one(prompt: Asked) -> None:
        row.requests += 1
        try:
            answer = await asyncio.wait_for(
                through(client, played.model, prefill, decode, prompt), _PATIENCE_S
            )
        except (RequestFailed, httpx.HTTPError, asyncio.TimeoutError) as error:
            row.failed += 1
            failures[f"{type(error).__name__}: {error}"[:160]] += 1
            return
        if prompt.answer is not None:
            row.sampled += 1
            row.wrong += answer.token_ids != prompt.answer

    async def connection() -> None:
        while queue and time.monotonic() < until:
            await one(queue.pop())
            advance()

    await asyncio.gather(*(connection() for _ in range(TOGETHER)))
    row.seconds = time.monotonic() - started
    await asyncio.sleep(_SETTLE_S)
    await one(asked[-1])  # what workers have counted is shown after a step
    await asyncio.sleep(_SETTLE_S)
    row.failures = dict(failures)
    row.counts = await counted(client, decode)
    for rank in await decode.rpc(client, "kvpatch_witness"):
        row.not_witnessed |= rank["not_witnessed"]
        row.farthest_learnt = max(row.farthest_learnt, rank["farthest_learnt"])
    return row


async def through(
    client: httpx.AsyncClient, model: str, prefill: Engine, decode: Engine, prompt: Asked
) -> Completion:
    """One request through both."""
    name = f"proof{uuid.uuid4().hex}"
    urls = prefill.url, decode.url
    return await prefill_then_decode(client, *urls, model, prompt.tokens, ANSWER_TOKENS, name)


async def counted(client: httpx.AsyncClient, engine: Engine) -> dict[str, int]:
    """What an engine's ``/metrics`` has counted of loads: by "metric label"."""
    response = await client.get(f"{engine.url}/metrics", timeout=60.0)
    response.raise_for_status()
    return counts_in(response.text)


_COUNTED = ("loads", "load_holds", "witnessed_loads", "load_digests", "reads", "refusals")


def counts_in(text: str) -> dict[str, int]:
    """The same, out of what it shows."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted = {f"kvpatch_{name}_total": name for name in _COUNTED}
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                found[f"{wanted[sample.name]} {_own_label(sample.labels)}"] = int(sample.value)
    return found


def _own_label(labels: Mapping[str, str]) -> str:
    return next((v for label, v in labels.items() if label not in ("model_name", "engine")), "")
