"""A D with pipeline stages, each of which has layers of its own.

Where no handshake names layers (<= 0.29), all stages ask one and the same stage of P. From 0.30 on
each reads its own layers of a P that has all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .host import Lab
from .stage import Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_names_no_layers = pytest.mark.on(
    listens_in_scheduler=True,
    names_regions=False,
    # <= 0.11.0 the stages of one machine listen at one port, and 0.24 and 0.25 refuse several.
    has=lambda release: not release.startswith(("0.24.", "0.25.")),
)
_names_layers = pytest.mark.on(names_regions=True)

STAGES = EngineSpec(
    block_tokens=64, planned_blocks=64, kv_heads=2, head_dim=16, tp_size=2, has_stages=True
)


@_names_no_layers
def test_stock_reads_one_stage_twice(stage: Stage) -> None:
    p, d = stage.start(STAGES), stage.start(STAGES)
    prompt = stage.prompt(150)

    d.ask(*p.compute(prompt))

    d.must_receive(prompt)
    wrong, total = d.wrong(prompt)
    assert wrong == total // 2


@_names_no_layers
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


SMALL = {"block_tokens": 16, "planned_blocks": 200}
P = replace(STAGES, layers=4, tp_size=1, has_stages=False)
MLA = EngineSpec("mla", layers=4, head_dim=64, block_tokens=64, planned_blocks=64)


def _staged(engine: EngineSpec) -> EngineSpec:
    return replace(engine, tp_size=2, has_stages=True)


#: P and D, and what stock makes of them; <= 0.31 it misreads smaller blocks.
PAIRS = {
    "alike": (P, P, "identical"),
    "P smaller": (replace(P, **SMALL), P, "identical"),
    "P smaller, MLA": (replace(MLA, **SMALL), MLA, "identical"),
    "P larger": (P, replace(P, **SMALL), "refused"),
    "HND to NHD": (P, replace(P, layout="NHD"), "refused"),
    "cross-layer blocks, MLA": (replace(MLA, layout="BLHNC", **SMALL), MLA, ""),
    "P of two ranks, smaller": (replace(P, tp_size=2, **SMALL), P, "refused"),
}


@_names_layers
@pytest.mark.parametrize("pair", PAIRS)
def test_each_stage_reads_its_own_layers(lab: Lab, pair: str) -> None:
    prefill, decode, stock = PAIRS[pair]
    case = Case(pair, prefill, _staged(decode), 150)

    lab.on_d(case).must_be("identical", moved=150)
    if stock and (stock != "identical" or Version(lab.release) >= Version("0.32")):
        lab.run(case.stock()).must_be(stock)


@_names_layers
def test_a_p_with_stages_too_is_refused(lab: Lab) -> None:
    """Stock asks P's first stage alone, and fails by an assertion on its layers."""
    case = Case("stages on both sides", _staged(replace(P, **SMALL)), _staged(P), 150)

    lab.on_d(case).must_be("refused", "--pipeline-parallel-size 1 on the prefill side")
    lab.run(case.stock()).must_be("refused")


@_names_layers
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_p_hears_of_a_load_from_all_stages(stage: Stage, block_tokens: int) -> None:
    prefill = stage.start(replace(P, **{**SMALL, "block_tokens": block_tokens}))
    decode = stage.start(replace(_staged(P).on(), own_scheduler=True))
    prompt = stage.prompt(150)

    decode.ask(*prefill.compute(prompt))

    decode.must_hold(prompt)
    assert prefill.heard([prompt]) == {prompt.name}
