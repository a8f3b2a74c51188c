"""A tiny random model, made in a second and without a download, and the prompts of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SYLLABLES = (
    *("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu"),
    *("shan", "trel", "quor", "ling"),
)
_COMPLETE = "tokenizer.json"

SIZES: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    # Ten times the usual value: with the usual one a random model's greedy tokens hardly depend on
    # its KV cache and a wrong cache would go unnoticed.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED_HEADS: Mapping[str, Any] = {**SIZES, "num_key_value_heads": 4, "head_dim": 32}


def words(count: int, seed: int = 0) -> list[str]:
    """``count`` made-up words, the same for the same seed."""
    rng = random.Random(seed)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(count)]


def make_tiny_llama(folder: Path) -> Path:
    """Write a Llama to ``folder`` unless it is there already; returns ``folder``."""

    def build(vocabulary: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **GROUPED_HEADS))

    return write(folder, build)


def write(folder: Path, build: Callable[[int], Any]) -> Path:
    """Save the model that ``build`` makes for a vocabulary of that size, and the tokenizer."""
    if (folder / _COMPLETE).exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words(20_000))], trainer)
    torch.manual_seed(0)
    build(tokenizer.get_vocab_size()).save_pretrained(folder)
    # Last, because its file marks the folder as complete.
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


# --- the prompts of a run -----------------------------------------------------------------

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
