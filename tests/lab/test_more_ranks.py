"""P has more ranks than D, on releases whose workers shake hands with one rank of a peer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import Case, EngineSpec
from .host import Lab
from .releases import moves_full_blocks_only
from .stage import Stage
from .test_failures import STAGED, assert_outlives, assert_served
from .test_like_pairs import tokens_to_move
from .test_several_peers import TOKENS, engine, introduce

pytestmark = [pytest.mark.lab, pytest.mark.on(meets_one_rank=True)]

_STAGED = (("KVPATCH_TRANSFER", "staged"), ("KVPATCH_STAGING_BYTES", str(1 << 18)))


def _case(p_tp: int, d_tp: int, p: int = 64, d: int = 64, heads: int = 4, **more: object) -> Case:
    common = {"kv_heads": heads, "planned_blocks": 16, "dtype": "float32"} | more
    prefill, decode = (
        EngineSpec(block_tokens=tokens, tp_size=ranks, **common)  # type: ignore[arg-type]
        for tokens, ranks in ((p, p_tp), (d, d_tp))
    )
    return Case(f"P {p} TP{p_tp}, D {d} TP{d_tp}", prefill, decode, prompt_tokens=150)


_CASES = {
    "one block size": _case(2, 1),
    "four ranks to two": replace(_case(4, 2, p=32), n_requests=3, prefix_hit_tokens=64),
    "four ranks to one": _case(4, 1, p=128, layout="NHD"),
    "heads that ranks share": _case(4, 1, heads=2),
    "ranks that all hold all": _case(2, 1, p=32, family="mla", head_dim=64),
    "a full prefix hit": replace(_case(4, 2), prompt_tokens=128, prefix_hit_tokens=128),
    "in rounds": _case(2, 1, p=32, settings=_STAGED),
}


@pytest.mark.parametrize("name", _CASES)
def test_all_ranks_are_read_and_told(lab: Lab, name: str) -> None:
    case = _CASES[name]

    lab.on_d(case).must_be("identical", moved=tokens_to_move(case, lab.release))


def test_stock_does_not_read_them(lab: Lab) -> None:
    """What is mended here, like engines included."""
    lab.run(_CASES["one block size"]).must_be("failed")


def test_ranks_that_do_not_divide_are_refused(lab: Lab) -> None:
    case = _case(3, 2, heads=6)

    lab.on_d(case).must_be("refused", "that is a multiple of the decode side's")


# -- what becomes of requests --------------------------------------------------


@pytest.mark.one_per_generation
def test_death_of_all_ranks_in_mid_transfer(stage: Stage, lab: Lab) -> None:
    # 0.10.0 reads no prompt of which P's last whole block of 32 may end before D's.
    tokens = 64 if moves_full_blocks_only(lab.release) else 32
    mortal = stage.prefill(engine(block_tokens=tokens, tp_size=2))
    survivor = stage.prefill(engine(tp_size=2))
    assert_outlives(stage.decode(STAGED), stage, lab.release, mortal, survivor)


@pytest.mark.one_per_generation
def test_every_rank_is_told_once(stage: Stage, lab: Lab) -> None:
    """Also those whose heads another rank holds too, and of a request that is never read."""
    prefill, decode = stage.prefill(engine(tp_size=4)), stage.decode(STAGED)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    prompt = stage.prompt(TOKENS)

    decode.call("refuse", *prefill.compute(prompt))

    assert prefill.heard([prompt]) == {prompt.name}
    assert_served(stage, lab.release, prefill, decode)
    # A rank that is told twice logs that it does not know the request.
    assert prefill.watch(seconds=0.1).logged == ()
