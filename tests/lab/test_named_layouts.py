"""vLLM's six named layouts (0.29 on), read in any combination with kvpatch on D alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from .case import Case, EngineSpec
from .host import Lab
from .release import HYBRID_MODEL_TOKENS
from .releases import is_full

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(names_layouts=True)]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
#: All there are in full runs; each layout at P beside two at D, and at D beside two at P.
PAIRS = [
    pair
    for pair in itertools.product(LAYOUTS, repeat=2)
    if is_full() or (LAYOUTS.index(pair[0]) + LAYOUTS.index(pair[1])) % 3 == 0
]


def _case(
    p_layout: str,
    d_layout: str,
    p_tokens: int = 32,
    d_tokens: int = 64,
    hit: int = 0,
    **common: object,
) -> Case:
    # Three layers and four heads: neither a square nor a power of the other.
    spec = EngineSpec(planned_blocks=16, layers=3, dtype="bfloat16")
    spec = replace(spec, **common)  # type: ignore[arg-type]
    prefill = replace(spec, layout=p_layout, block_tokens=p_tokens)
    decode = replace(spec, layout=d_layout, block_tokens=d_tokens)
    named = ", ".join(f"{name} {value}" for name, value in common.items())
    name = f"P {p_layout} {p_tokens}, D {d_layout} {d_tokens}, {hit} cached {named}"
    return Case(name, prefill, decode, prompt_tokens=150, prefix_hit_tokens=hit)


def _groups(layout: str, tokens: int) -> EngineSpec:
    blocks = 3 * (HYBRID_MODEL_TOKENS // tokens + 2)
    return EngineSpec(
        layout=layout, block_tokens=tokens, planned_blocks=blocks, layers=4, window_tokens=(0, 64)
    )


def _case_of_groups(p: str, d: str) -> Case:
    return Case(f"groups, P {p}, D {d}", _groups(p, 32), _groups(d, 64), 300)


def _of(case: Case, prefill: dict[str, object], decode: dict[str, object]) -> Case:
    """The same case, of which sides have these."""
    return replace(
        case,
        name=f"{case.name}, {[*prefill.values()]} to {[*decode.values()]}",
        prefill=replace(case.prefill, **prefill),  # type: ignore[arg-type]
        decode=replace(case.decode, **decode),  # type: ignore[arg-type]
    )


def _identical() -> Iterator[Case]:
    """Any layout into any; some with other blocks and a hit, ranks, heads, ways to read."""
    yield from (_case(*pair) for pair in PAIRS)
    for p, p_tokens, d, d_tokens in (
        ("LHBNC", 32, "BLNHC", 32),
        ("BHLNC", 32, "LBNHC", 32),
        ("BLNHC", 96, "BHLNC", 64),
        ("LHBNC", 96, "LHBNC", 64),
        ("BHLNC", 16, "LHBNC", 128),
        ("BLNHC", 128, "BLHNC", 16),
    ):
        yield _case(p, d, p_tokens, d_tokens, hit=d_tokens)
    for p, p_tp, d, d_tp, d_tokens in (
        ("BHLNC", 1, "LBHNC", 2, 64),
        ("BHLNC", 1, "BHLNC", 2, 32),
        ("LHBNC", 1, "BLNHC", 2, 64),
        ("BLNHC", 2, "LHBNC", 1, 64),
        ("LHBNC", 2, "LHBNC", 1, 32),
    ):
        yield _of(_case(p, d, 32, d_tokens), {"tp_size": p_tp}, {"tp_size": d_tp})
    # A single head's page is in one piece in every layout; 0.29 does not notice it.
    for pair in (("BHLNC", "LHBNC"), ("LHBNC", "BLNHC"), ("BLNHC", "BHLNC")):
        yield _case(*pair, kv_heads=1)
    for pair in (("BHLNC", "LBHNC"), ("LBHNC", "BHLNC"), ("BLNHC", "BLHNC"), ("LHBNC", "BLNHC")):
        yield _case(*pair, family="mla", head_dim=64)
    # Sorted as names, the eleventh layer would come before the third.
    for pair in (("BHLNC", "LHBNC"), ("LHBNC", "BLNHC")):
        yield _case(*pair, layers=12)
    # In rows each group's layers follow one another from the beginning, as the plan has them.
    for pair in (
        *(("LHBNC", "LBHNC"), ("LBHNC", "LHBNC"), ("LBHNC", "BHLNC"), ("BLHNC", "BLNHC")),
        *(("BLNHC", "LBHNC"), ("BHLNC", "LBHNC")),
    ):
        yield _case_of_groups(*pair)
    for pair in (("LHBNC", "BLNHC"), ("BHLNC", "LHBNC"), ("BLNHC", "BHLNC"), ("BHLNC", "LBNHC")):
        for way in ("direct", "staged"):
            yield _of(_case(*pair, 96, 64), {}, {"settings": (("KVPATCH_TRANSFER", way),)})


@pytest.mark.parametrize("case", list(_identical()), ids=lambda case: case.name)
def test_it_is_identical(lab: Lab, case: Case) -> None:
    lab.on_d(case).must_be("identical", moved=case.prompt_tokens - case.prefix_hit_tokens)
