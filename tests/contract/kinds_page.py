"""docs/explanation/kinds.md: the table of kinds, from the table itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvpatch.worker.cache_kinds import BACKENDS, DERIVED, SPECS, WITH_DTYPE, WITH_VARIABLE, Kind

from .tables import ROOT, remade, rows_below

PAGE = ROOT / "docs" / "explanation" / "kinds.md"


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


def _played(contents: str) -> str:
    """Who plays a kind, in words."""
    if contents in NOT_PLAYED:
        return f"not played: {NOT_PLAYED[contents]}"
    file, test = PLAYED[contents]
    return f"`{file}`, {test}"


def page() -> str:
    """The whole document."""
    rows = [
        (
            kind.contents,
            kind.holds.value + _heads(kind),
            ", ".join(sorted(names)),
            _played(kind.contents),
        )
        for kind, names in sorted(
            kinds().items(), key=lambda of: (of[0].holds.name, of[0].contents)
        )
    ]
    silent = ", ".join(f"`{name}`" for name, kind in SPECS.items() if kind is None)
    return remade(
        PAGE,
        rows_below(("a block holds", "so it is", "told by", "played by"), rows),
        (r"(Specs that say nothing beside the backend: ).*(?=\.\n)", silent),
    )


def kinds() -> Mapping[Kind, list[str]]:
    """What tells each kind, in Markdown."""
    told: defaultdict[Kind, list[str]] = defaultdict(list)
    for name, kind in BACKENDS.items():
        told[kind].append(f"`{name}`")
    for name, (variable, kind) in WITH_VARIABLE.items():
        told[kind].append(f"`{name}` with `{variable}`")
    for start, kind in WITH_DTYPE.items():
        told[kind].append(f"`--kv-cache-dtype {start}...`")
    for prefix, kind in DERIVED.items():
        told[kind].append(f"`{prefix}...`")
    for name, of_spec in SPECS.items():
        if of_spec is not None:
            told[of_spec].append(f"`{name}`")
    return told


def _heads(kind: Kind) -> str:
    return (", heads mixed" if kind.mixes_heads else "") + (", which join" if kind.joins else "")
