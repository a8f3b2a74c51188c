"""Which test of the lab plays each kind of cache, or why none does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

LAB = Path(__file__).resolve().parents[1] / "lab"

#: By what a block holds: a file of the lab, and a test in it.
PLAYED: Mapping[str, tuple[str, str]] = {
    "a latent of each token": ("test_unlike_engines.py", "test_unlike_pair_is_identical"),
    "keys and values of each token": ("test_unlike_engines.py", "test_unlike_pair_is_identical"),
    "keys and values of each token, packed, their scales beside them": (
        "test_layer_kinds.py",
        "turboquant",
    ),
    "the state behind a block's tokens": (
        "test_kvcached_state.py",
        "test_state_moves_with_attention",
    ),
    "a ring of what is not compressed yet": ("test_layer_kinds.py", "qsa"),
    "an indexer's values of all tokens, then their scales": (
        "test_kinds.py",
        "test_indexers_of_unlike_ranks",
    ),
    "compressed latents of all tokens, then their scales": ("test_layer_kinds.py", "deepseek-v4"),
    "keys in tiles of a block, packed by the hardware's rules": ("test_layer_kinds.py", "tiles"),
    "keys or summaries that stand for several tokens": ("test_layer_kinds.py", "summaries"),
    "packed keys of all heads, then their scales, and values likewise": (
        "test_layer_kinds.py",
        "nvfp4",
    ),
    "packed values of all tokens of a head, then their scales": (
        "test_layer_kinds.py",
        "nvfp4 by head",
    ),
    "several positions to a token": ("test_layer_kinds.py", "whisper"),
    "shuffled keys and values, in tiles of a whole block": (
        "test_kinds.py",
        "test_shuffled_keys_are_never_rows",
    ),
    "two slots, keys and values of all heads": (
        "test_kinds.py",
        "test_slots_of_all_heads_are_never_cut",
    ),
}

#: The same, and the reason.
NOT_PLAYED: Mapping[str, str] = {
    "what two backends hold": "vLLM makes such backends of two with rows alone, and those are "
    "played as rows (`test_layer_kinds.py`, composite)",
    "nothing of its own": "the backend of models without attention (0.10), of which nothing is "
    "registered",
}


def played(contents: str) -> str:
    """Who plays a kind, in words."""
    if contents in NOT_PLAYED:
        return f"not played: {NOT_PLAYED[contents]}"
    file, test = PLAYED[contents]
    return f"`{file}`, {test}"


def is_there(file: str, test: str) -> bool:
    """Whether a file of the lab has a test of that name, or a model of that name in its table."""
    text = (LAB / file).read_text()
    return f"def {test}(" in text or f'    "{test}": Model(' in text
