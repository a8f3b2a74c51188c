"""Pipeline parallelism where no handshake names layers (<= 0.29): D's stages ask one of P."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import EngineSpec
from .stage import Stage

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    # <= 0.11.0 the stages of one machine listen at one port, and 0.24 and 0.25 refuse several.
    pytest.mark.on(
        listens_in_scheduler=True,
        names_regions=False,
        has=lambda release: not release.startswith(("0.24.", "0.25.")),
    ),
]

STAGES = EngineSpec(
    block_tokens=64, planned_blocks=64, kv_heads=2, head_dim=16, tp_size=2, has_stages=True
)


def test_stock_reads_one_stage_twice(stage: Stage) -> None:
    p, d = stage.start(STAGES), stage.start(STAGES)
    prompt = stage.prompt(150)

    d.ask(*p.compute(prompt))

    d.must_receive(prompt)
    wrong, total = d.wrong(prompt)
    assert wrong == total // 2


@pytest.mark.parametrize("stock_workers", [False, True])
@pytest.mark.parametrize("block_tokens", [64, 32])
def test_no_stage_is_given_a_load(
    stage: Stage,
    block_tokens: int,
    stock_workers: bool,  # noqa: FBT001
) -> None:
    """D computes its prompts."""
    prefill = stage.start(STAGES.on())
    own = replace(STAGES.on(), own_scheduler=True, stock_workers=stock_workers)
    decode = stage.start(replace(own, block_tokens=block_tokens))

    assert [decode.ask(*prefill.compute(stage.prompt(150))) for _ in range(3)] == [0, 0, 0]
