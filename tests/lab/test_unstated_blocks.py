"""What a handshake of ``<= 0.20`` leaves open: P's kvpatch states it, or D's operator does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import PEER_BLOCK_SIZE, PEER_LAYOUT, Case, EngineSpec
from .host import Lab
from .releases import (
    declaring,
    moves_full_blocks_only,
    states_block_size,
    states_layout,
    tells_blocks,
)
from .stage import Stage
from .test_like_pairs import tokens_to_move

pytestmark = [
    pytest.mark.lab,
    pytest.mark.one_per_generation,
    pytest.mark.on(has=lambda release: not tells_blocks(release)),
]

_WARNING = "is taken for an engine like this one"


def spec(release: str, block_tokens: int, **more: object) -> EngineSpec:
    """An engine of whose blocks a handshake does not say all; FlashInfer cuts those of 128."""
    found = EngineSpec("flash", "HND", block_tokens, 90, kv_heads=2, head_dim=16)
    if states_block_size(release):
        found = replace(found, family="flashinfer", parts=max(1, block_tokens // 64))
    return replace(found, **more)  # type: ignore[arg-type]


def pair(release: str, p: int, d: int, **of_p: object) -> Case:
    """Eight blocks of P's, but for some tokens where a part of a block is loaded."""
    tokens = 8 * p - (0 if moves_full_blocks_only(release) else 20)
    return Case(f"P {p}, D {d}", spec(release, p, **of_p), spec(release, d), tokens)


@pytest.mark.parametrize(("p", "d"), [(128, 64), (64, 128), (128, 16), (32, 128), (32, 16)])
@pytest.mark.parametrize("says", ["P states it", "D declares it"])
def test_unlike_blocks(lab: Lab, p: int, d: int, says: str) -> None:
    case = pair(lab.release, p, d)

    lab.run(case.patched(prefill=says == "P states it")).must_be(
        "identical", moved=tokens_to_move(case, lab.release)
    )


@pytest.mark.parametrize(("p", "d"), [(128, 16), (64, 16), (64, 32)])
def test_an_unlike_p_of_which_nobody_says_it_is_refused(lab: Lab, p: int, d: int) -> None:
    report = lab.on_d(pair(lab.release, p, d), declares=False)

    if moves_full_blocks_only(lab.release) and p > d:  # too few of D's: D computes the prompt
        assert (report.outcome, report.moved_tokens) == ("failed", 0), report
        assert "P was not told" in report.detail
        return
    report.must_be("refused", PEER_BLOCK_SIZE, "ENABLE_KVPATCH on P")


def test_a_like_p_of_which_nobody_says_it_is_vllms_with_one_warning(stage: Stage, lab: Lab) -> None:
    own = spec(lab.release, 64)
    p, d = stage.start(own), stage.decode(own)
    prompts = stage.prompts(2, 6 * 64)

    for prompt in prompts:
        d.ask(*p.compute(prompt))
        d.must_receive(prompt)

    assert d.wrong(*prompts)[0] == 0
    assert not d.unlike()
    warned = [line for line in d.call("warned") if _WARNING in line]
    assert len(warned) == 1 and PEER_BLOCK_SIZE in warned[0], warned
    assert (PEER_LAYOUT in warned[0]) is not states_layout(lab.release)


@pytest.mark.parametrize("says", ["P states it", "D declares it"])
def test_nobody_is_warned_of_a_like_p_of_which_all_is_said(
    stage: Stage, lab: Lab, says: str
) -> None:
    own = spec(lab.release, 64)
    case = Case("like", own, own, 300).patched(prefill=says == "P states it")
    case = declaring(case, lab.release)
    p, d = stage.start(case.prefill), stage.start(case.decode)
    stage.load(p, d, 256)
    assert not [line for line in d.call("warned") if _WARNING in line]


def test_a_wrong_declaration_is_refused_where_p_states_otherwise(lab: Lab) -> None:
    case = pair(lab.release, 128, 64).patched()
    said = replace(case.decode, settings=((PEER_BLOCK_SIZE, "64"),))

    lab.run(replace(case, decode=said)).must_be(
        "refused", f"{PEER_BLOCK_SIZE} declares blocks of 64 tokens"
    )


def test_known_wrong_a_p_that_looks_like_d(lab: Lab) -> None:
    """What the warning is about: the handshake of an unlike P that is that of a like one."""
    case = pair(lab.release, 128, 64)
    if not states_block_size(lab.release):  # as many bytes, of items half as large
        case = pair(lab.release, 32, 16, dtype="fp8")
    tokens = 32 if moves_full_blocks_only(lab.release) else 16
    case = replace(case, prompt_tokens=tokens)

    report = lab.on_d(case, declares=False)

    # 0.10.0 names whole blocks alone: D computes what it cannot load.
    expected = "identical" if moves_full_blocks_only(lab.release) else "corrupt"
    assert report.outcome == expected, report
    assert bool(report.moved_tokens) is (expected == "corrupt")
    report = lab.run(case.patched())
    expected = "identical" if states_block_size(lab.release) else "refused"
    assert report.outcome == expected, report


# --- 0.10.0 states no layout ---------------------------------------------------------------


@pytest.mark.on(states_layout=False)
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize(("p", "d"), [(16, 16), (32, 16), (16, 48)])
@pytest.mark.parametrize("says", ["P states it", "D declares it"])
def test_layouts(lab: Lab, p: int, d: int, layouts: tuple[str, str], says: str) -> None:
    case = pair(lab.release, p, d, layout=layouts[0])
    decode = replace(case.decode, layout=layouts[1])
    case = replace(case, decode=decode, prompt_tokens=4 * p * d // 16)

    lab.run(case.patched(prefill=says == "P states it")).must_be(
        "identical", moved=case.prompt_tokens
    )


@pytest.mark.on(states_layout=False)
def test_a_d_of_another_layout_than_vllm_chooses_refuses_what_nobody_says(lab: Lab) -> None:
    case = pair(lab.release, 16, 16)
    case = replace(case, decode=replace(case.decode, layout="NHD"))

    lab.on_d(case, declares=False).must_be("refused", PEER_LAYOUT)


@pytest.mark.on(states_layout=False)
@pytest.mark.parametrize("step_tokens", [40, 2048])
@pytest.mark.parametrize(("p", "d"), [(16, 16), (32, 16), (16, 48)])
def test_with_the_releases_own_scheduler(
    stage: Stage, lab: Lab, p: int, d: int, step_tokens: int
) -> None:
    """D loads the whole blocks that P names, and computes the rest."""
    own = {"own_scheduler": True, "step_tokens": step_tokens}
    prefill = stage.start(spec(lab.release, p, layout="NHD", patched=True))
    decode = stage.decode(spec(lab.release, d, **own))
    for tokens in (190, 192):
        prompt = stage.prompt(tokens)

        (served,) = decode.complete(*prefill.compute(prompt))

        assert served.status == "FINISHED_LENGTH_CAPPED"
        assert decode.wrong(prompt)[0] == 0
        assert prefill.heard([prompt]) == {prompt.name}
