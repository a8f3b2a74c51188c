"""Which prompts a run sends. Pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SEQUENTIAL_TOKENS = (1, 3, 17, 31, 45, 101, 163, 259, 421)
"""Prompt lengths sent one by one: one token to several blocks, none a multiple of a block size."""

SHARED_PREFIX_TOKENS = (35, 67, 131)
"""Lengths of what each pair ``prefix-*`` has in common: one whole block of 32, 64, 96 or 128 tokens
for at least one of them, and a part of the next."""

CONCURRENT_TOKENS = (5, 23, 41, 67, 90, 119, 203, 310)
"""Prompt lengths sent all at once."""

CONTROL_TOKENS = (7, 75, 217)
"""Prompt lengths of the negative control; each longer than one token, because the decode engine
computes the last prompt token itself and so overwrites the only one of a one-token prompt."""


@dataclass(frozen=True)
class Case:
    """One prompt.

    ``step`` orders the run: cases of one step are sent together, the next step begins when all of
    them have answered. ``control`` marks the prompts that are kept for the negative control: a
    decode engine must not have seen them, or its prefix cache would answer instead of a transfer.
    """

    name: str
    token_ids: tuple[int, ...]
    step: int
    control: bool = False

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def build_cases(vocabulary: Sequence[int], seed: int = 0) -> tuple[Case, ...]:
    """All cases of a run, over the ordinary (not special) token ids in ``vocabulary``.

    Raises:
        ValueError: fewer than 16 distinct ids, too few for prompts that do not share prefixes.
    """
    ids = sorted(set(vocabulary))
    if len(ids) < 16:
        raise ValueError(f"prompts need at least 16 distinct token ids, found {len(ids)}")
    rng = random.Random(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(ids, k=count))

    cases: list[Case] = []
    step = 0
    for tokens in SEQUENTIAL_TOKENS:
        cases.append(Case(f"len-{tokens}", draw(tokens), step))
        step += 1
    for tokens in SHARED_PREFIX_TOKENS:
        prefix = draw(tokens)
        for name, tail in (("a", 26), ("b", 71)):
            cases.append(Case(f"prefix-{tokens}-{name}", prefix + draw(tail), step))
            step += 1
    for tokens in CONCURRENT_TOKENS:
        cases.append(Case(f"together-{tokens}", draw(tokens), step))
    step += 1
    for tokens in CONTROL_TOKENS:
        cases.append(Case(f"control-{tokens}", draw(tokens), step, control=True))
        step += 1
    return tuple(cases)


def steps(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases grouped by step, in the order of the steps."""
    by_step: dict[int, list[Case]] = {}
    for case in cases:
        by_step.setdefault(case.step, []).append(case)
    return [by_step[step] for step in sorted(by_step)]
