"""A scheduler with kvpatch and workers without it: Ray's, or a headless node's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .host import Lab
from .stage import Actor, Stage

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(states_block_size=True),
]

#: D's blocks have 64 tokens.
SPEC = EngineSpec(
    block_tokens=64, planned_blocks=60, layers=2, kv_heads=2, head_dim=16, dtype="float32"
)
OWN = replace(SPEC, own_scheduler=True, stock_workers=True)
_WARNING = "not in all of its workers"


def _load(prefill: Actor, decode: Actor, tokens: int, stage: Stage) -> int:
    """The tokens that D loads of a prompt; what it loads is right."""
    prompt = stage.prompt(tokens)
    loaded = decode.ask(*prefill.compute(prompt))
    if loaded:
        decode.must_hold(prompt)
    return loaded


def test_a_like_peer_is_read_once_a_prompt_of_several_blocks_has_shown_it(stage: Stage) -> None:
    """One of one block tells nothing: D computes it, and no worker ends by it."""
    prefill, decode = stage.prefill(SPEC), stage.decode(OWN)

    assert [_load(prefill, decode, n, stage) for n in (40, 64, 150, 40, 10)] == [0, 0, 150, 40, 10]

    assert any(_WARNING in line for line in decode.call("logged"))


@pytest.mark.parametrize("p_tokens", [16, 32, 128])
def test_of_an_unlike_peer_d_computes_all(stage: Stage, lab: Lab, p_tokens: int) -> None:
    prefill = stage.prefill(replace(SPEC, block_tokens=p_tokens))
    decode = stage.decode(OWN)

    assert [_load(prefill, decode, n, stage) for n in (10, 40, 64, 300)] == [0, 0, 0, 0]

    prompt = stage.prompt(200)
    (ask,) = prefill.compute(prompt)
    assert decode.ask(ask) == 0
    decode.watch(prompt, seconds=1)  # no worker reports, or ends by, what nobody waits for
    is_told = Version(lab.release) >= Version("0.30") and p_tokens < 128
    assert prefill.heard([prompt], 20 if is_told else 0.1) == ({prompt.name} if is_told else set())


def test_workers_with_kvpatch_load_a_first_prompt_of_one_block(stage: Stage) -> None:
    decode = stage.decode(replace(OWN, stock_workers=False))

    assert _load(stage.prefill(SPEC), decode, 40, stage) == 40
    assert not any(_WARNING in line for line in decode.call("logged"))


def test_what_stock_makes_of_such_an_unlike_peer(lab: Lab) -> None:
    """What D keeps from its workers, and that the lab sees it."""
    prefill, decode = (EngineSpec(block_tokens=tokens) for tokens in (16, 32))
    case = Case("16 to 32, 40 tokens", prefill, decode, 40, 32)

    is_refused = Version("0.23") <= Version(lab.release) < Version("0.26")  # 16 are no 32 there
    lab.run(case.stock()).must_be("refused" if is_refused else "corrupt")
