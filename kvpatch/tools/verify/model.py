"""A tiny random model with its tokenizer, made in a second and without a download."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
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
