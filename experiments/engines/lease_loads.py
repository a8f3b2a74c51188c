"""Blocks gone stale in earnest: P's lease of 2 s ends, and others' prompts take the blocks that D
then reads. What the hold's word, and the witness on D alone, say of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from experiments.engines.good_loads import counted
from experiments.engines.references import Prompt
from experiments.engines.routed import Play, batches
from experiments.engines.scenes import Told, stale

#: What the witness learns from, and some more.
WARM_UP = 72
_WARM_UP_TOKENS = (40, 200)
_SETTLE_S = 1.5


@dataclass
class Row:
    """One pair.

    Attributes:
        right, wrong, failed: of the requests, by their answers.
        counts: what D's /metrics has counted of loads meanwhile, by metric and label.
    """

    setting: str
    dtype: str
    model: str
    requests: int
    right: int = 0
    wrong: int = 0
    failed: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    stage: str = "lease"

    def count(self, metric: str, label: str) -> int:
        """What D has counted of ``kvpatch_METRIC_total``."""
        return self.counts.get(f"{metric} {label}", 0)


async def serve(
    play: Play, prompts: Sequence[Prompt], row: Row, advance: Callable[[], None]
) -> Row:
    """Good loads, then loads of which each comes too late."""
    chance = random.Random(17)
    warm_up = [
        Prompt(tuple(chance.choices(play.words, k=chance.randint(*_WARM_UP_TOKENS))), ())
        for _ in range(WARM_UP)
    ]
    for batch in batches(warm_up):
        await asyncio.gather(*map(play.served, batch))
    before = await _counts(play, chance)
    told = Told(advance)
    await stale(play, prompts, told)
    now = await _counts(play, chance)
    row.counts = {name: count - before.get(name, 0) for name, count in now.items()}
    row.right, row.wrong = told.outcomes["right"], told.outcomes["wrong"]
    row.failed = told.outcomes.total() - row.right - row.wrong
    return row


async def _counts(play: Play, chance: random.Random) -> dict[str, int]:
    """By D's /metrics, which are shown after a step; one more good load makes one."""
    await asyncio.sleep(_SETTLE_S)
    await play.served(Prompt(tuple(chance.choices(play.words, k=_WARM_UP_TOKENS[0])), ()))
    await asyncio.sleep(_SETTLE_S)
    return await counted(play.client, play.decode)
