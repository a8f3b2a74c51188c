"""Context parallelism, of which no handshake says anything <= 0.28: D goes by P's list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import EngineSpec
from .host import Lab
from .releases import states_block_size
from .stage import Stage

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(context_sizes=True, states_context_parallelism=False),
]

ALONE = EngineSpec(block_tokens=16, planned_blocks=64, kv_heads=2, head_dim=16, tp_size=2)
SHARED = replace(ALONE, contexts=2)
PAIRS = {
    "like": (SHARED, 100, True),
    "like, of one block": (SHARED, 30, False),
    "P without": (ALONE, 100, False),
    "P without, of one block": (ALONE, 10, False),
    "P of four": (replace(SHARED, contexts=4), 100, False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_only_blocks_that_fit_are_loaded(stage: Stage, lab: Lab, name: str) -> None:
    prefill, tokens, is_loaded = PAIRS[name]
    if is_loaded and not states_block_size(lab.release):
        pytest.skip("the first prompt of each P is computed (<= 0.11.0)")
    p, d = stage.prefill(prefill), stage.decode(SHARED)
    prompt = stage.prompt(tokens)

    found = d.ask(*p.compute(prompt))

    assert found == (tokens if is_loaded else 0)
    d.watch(prompt, seconds=30 if found else 1)
    assert p.heard([prompt]) == {prompt.name}  # of blocks that D does not load, too


@pytest.mark.parametrize("name", ["P without", "P without, of one block"])
def test_stock_loads_them(stage: Stage, name: str) -> None:
    """Half of the tokens, and others in their places."""
    prefill, tokens, _ = PAIRS[name]
    p, d = stage.prefill(prefill), stage.decode(SHARED, patched=False)
    prompt = stage.prompt(tokens)

    assert d.ask(*p.compute(prompt)) == tokens
    d.must_receive(prompt)
