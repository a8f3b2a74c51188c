"""docs/explanation/kinds.md: the table of kinds, from the table itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from kvpatch.worker.cache_kinds import BACKENDS, DERIVED, SPECS, WITH_DTYPE, WITH_VARIABLE, Kind

from .kinds_played import played

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "kinds.md"

_HEAD = """\
# Kinds of cache

What does a block hold, and what may be done with it? Written by `python -m tests.contract --write` from
`kvpatch/worker/cache_kinds.py`, which was read from the sources of all supported releases.

| a block holds | what kvpatch does |
|---|---|
| **rows of tokens** | pairs them by token with blocks of any size and layout, splits them over any ranks, and zeroes the tokens behind the last one. A CPU's keys by column, and tiles (AMX, bfloat16), are axes of strides too |
| a **whole** | moves it whole between equal kernel blocks and equal heads; never cuts or zeroes it. Other peers are refused |
| a whole, and smaller ones **join** | from 0.32 on vLLM itself reads a P of smaller blocks; kvpatch hands it the blocks that belong together |
| a **recurrent state** | moves it whole between equal ranks. From 0.20 on each rank's share of Mamba2, Mamba1 and gated delta nets (x, B and C; q, k and v) moves to the ranks that have it; other kinds are refused between unlike ranks |

A backend or `KVCacheSpec` that is not in the table below may hold anything. vLLM reads it between like
engines, it moves whole behind a host buffer, and a peer of another geometry is refused with its name.
A backend that vLLM derives for chunked local, cross or encoder attention, sinks or fast prefill holds
what its base holds.

!!! warning
    No handshake states `VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT`: set it on both sides or on neither. AITER's
    shuffled fp8 caches keep scales outside of the cache, which no release transfers.

"Played by" names tests of `tests/lab`: real connectors over real NIXL in host memory, in like pairs, in
heterogeneous ones and with a spoiled cache. In `test_layer_kinds.py` the release itself lays out the
specs of its models (from 0.29 on).

| a block holds | so it is | told by | played by |
|---|---|---|---|
"""  # noqa: E501


def page() -> str:
    """The whole document."""
    rows = [
        f"| {kind.contents} | {kind.holds.value}{_heads(kind)} | {', '.join(sorted(names))} | "
        f"{played(kind.contents)} |"
        for kind, names in sorted(
            kinds().items(), key=lambda of: (of[0].holds.name, of[0].contents)
        )
    ]
    silent = ", ".join(f"`{name}`" for name, kind in SPECS.items() if kind is None)
    return _HEAD + "\n".join(rows) + f"\n\nSpecs that say nothing beside the backend: {silent}.\n"


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
