"""docs/explanation/kinds.md: the table of kinds, from the table itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from kvpatch.worker.cache_kinds import (
    BACKENDS,
    DERIVED,
    SPECS,
    WITH_DTYPE,
    WITH_VARIABLE,
    Kind,
)

from .kinds_played import played

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "kinds.md"

_HEAD = """\
# Kinds of cache

Written by `python -m tests.contract --write` from `kvpatch/worker/cache_kinds.py`, which
was read from the sources of all supported releases, on CUDA, ROCm, XPU, CPU and TPU.

What a block holds decides what may be done with it:

- **rows of tokens** are paired by token with blocks of any size and layout, split over any ranks,
  and zeroed behind the last token; a CPU's keys lie by column, or with AMX and bfloat16 keys and
  values lie in tiles, which are axes of strides like any others;
- **whole blocks** move whole, between equal kernel blocks and equal heads, and are never cut nor
  zeroed; a peer with other ones is refused with the words below. Where smaller ones **join**, one
  behind the other, to a larger one, vLLM from 0.32 on reads a P of smaller blocks rightly, and such
  a P is left to it; kvpatch hands it the blocks that belong together;
- **recurrent state** is one for all tokens, and moves whole between as many ranks. Of Mamba2,
  Mamba1 and gated delta nets a rank's share of each part (x, B and C; q, k and v) moves to the
  ranks that have it, from 0.20 on; other kinds are refused between unlike ranks.

A backend or a `KVCacheSpec` that is not here (an out-of-tree platform's, or a new release's) may
hold anything: it is left to the release between engines alike, moves whole behind a host buffer,
and a peer of another geometry is refused with its name. A backend that vLLM derives from one of
these for chunked local, cross or encoder attention, sinks or fast prefill holds what that one does.

Not seen by anybody: whether P shuffles its keys where D does (`VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT`).
The handshake does not say so, and both call themselves FLASH_ATTN: set it on both sides or on
neither. AITER's shuffled fp8 caches have scales outside of the cache, which no release transfers.

Played: by tests of `tests/lab`, real connectors over real NIXL with contents of that structure,
in like pairs, in heterogeneous ones and in a spoiled one. What `test_layer_kinds.py` plays is laid
out by the release itself (from 0.29), of specs with the fields that its models give; the models are
lists of such layers. All devices are host memory there.

| a block holds | so it is | told by | played by |
|---|---|---|---|
"""


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
