"""What the prompts of the proofs are made of: words in any order, or excerpts of a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpatch.core.errors import EngineFailed


class PromptTokens(Protocol):
    """Where prompts come from."""

    def draw(self, chance: random.Random, count: int) -> tuple[int, ...]:
        """So many token ids in a row."""


@dataclass(frozen=True)
class Words:
    """Tokens in any order, for a model whose weights are random anyway."""

    known: Sequence[int]

    def draw(self, chance: random.Random, count: int) -> tuple[int, ...]:
        return tuple(chance.choices(self.known, k=count))


@dataclass(frozen=True)
class Excerpts:
    """Passages of a text, for a model that has learnt a language."""

    text: Sequence[int]

    def draw(self, chance: random.Random, count: int) -> tuple[int, ...]:
        begin = chance.randrange(len(self.text) - count + 1)
        return tuple(self.text[begin : begin + count])


def excerpts_of(file: Path, model: str, longest: int) -> Excerpts:
    """The file's text in tokens of the model's own tokenizer.

    Raises:
        EngineFailed: the text is too short for prompts of ``longest`` tokens that differ.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(file.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < _LONGER * longest:
        raise EngineFailed(
            f"{file} has {len(tokens)} tokens: expected {_LONGER * longest} or more, so that "
            f"prompts of {longest} tokens differ; name a longer text"
        )
    return Excerpts(tokens)


_LONGER = 10
