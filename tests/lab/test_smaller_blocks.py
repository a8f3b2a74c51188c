"""P has smaller blocks than a D whose cache kvpatch does not read into: the release reads them.

A layer of D's looks at another one's cache, and has none of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.28")]


def _case(p_tokens: int, prompt_tokens: int = 150, hit_tokens: int = 0) -> Case:
    prefill, decode = (
        EngineSpec(
            block_tokens=block_tokens,
            tp_size=ranks,
            planned_blocks=32,
            dtype="float32",
            sharing_layers=1,
            own_scheduler=True,
        )
        for block_tokens, ranks in ((p_tokens, 1), (64, 2))
    )
    name = f"P {p_tokens} TP1, D 64 TP2, {prompt_tokens} tokens, {hit_tokens} cached"
    return Case(name, prefill, decode, prompt_tokens, hit_tokens)


#: Before 0.32 releases put heads in wrong places of larger blocks.
_READS_HEADS = pytest.mark.on(since="0.32")


@_READS_HEADS
def test_requests_that_the_release_pairs_rightly_are_its_own(lab: Lab) -> None:
    """Such a peer was refused once, for the sake of the next test's."""
    case = _case(32)

    stock, patched = lab.run(case), lab.on_d(case)

    stock.must_be("identical")
    patched.must_be("identical")
    assert patched.descriptors == stock.descriptors


@_READS_HEADS
@pytest.mark.parametrize("prompt_tokens", [129, 150, 192])
def test_a_prefix_hit_is_paired_by_token(lab: Lab, prompt_tokens: int) -> None:
    case = _case(32, prompt_tokens, hit_tokens=64)

    lab.on_d(case).must_be("identical")


def test_stock_pairs_a_prefix_hit_from_the_end(lab: Lab) -> None:
    stock = lab.run(_case(32, hit_tokens=64))

    stock.must_be("corrupt")
    assert stock.wrong_elements > 0


@pytest.mark.on(before="0.32")
def test_a_peer_of_which_every_request_would_be_wrong(lab: Lab) -> None:
    lab.on_d(_case(32)).must_be("refused", "puts heads in wrong places")


@pytest.mark.parametrize("prompt_tokens", [150, 128])
def test_a_last_block_of_latents(lab: Lab, prompt_tokens: int) -> None:
    """0.29 to 0.31 take the heads of [block, 1, token, channel] for the tokens of a block.

    They zero all of a last block that P's do not fill.
    """
    case = _case(16, prompt_tokens)
    latents = {"family": "mla", "head_dim": 64, "dtype": "bfloat16", "tp_size": 1}
    case = replace(
        case, prefill=replace(case.prefill, **latents), decode=replace(case.decode, **latents)
    )
    is_wrong = Version("0.29") <= Version(lab.release) < Version("0.32")

    stock, report = lab.run(case), lab.on_d(case)

    stock.must_be("corrupt" if is_wrong and prompt_tokens % 64 else "identical")
    if is_wrong:
        report.must_be("refused", "a prompt's last block")
    else:
        report.must_be("identical")


_WINDOWS = EngineSpec(
    layers=4, planned_blocks=100, dtype="float32", sharing_layers=2, own_scheduler=True
)
_MODELS = {
    "one shape": replace(_WINDOWS, window_tokens=(0, 64)),
    "wide windows": replace(
        _WINDOWS, window_tokens=(0, 64), kv_heads=4, head_dim=16, window_shape=(8, 16)
    ),
    "wide full attention": replace(
        _WINDOWS, window_tokens=(64, 0), kv_heads=2, head_dim=16, full_shape=(2, 32)
    ),
}


@_READS_HEADS
@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize("prompt_tokens", [129, 144])
def test_windows_of_unlike_shapes(lab: Lab, model: str, prompt_tokens: int) -> None:
    """Their groups have blocks of unlike tokens; P's list of 144 begins with a null block."""
    prefill, decode = (replace(_MODELS[model], block_tokens=tokens) for tokens in (16, 32))
    case = Case(f"{model}, {prompt_tokens} tokens", prefill, decode, prompt_tokens)

    lab.run(case).must_be("identical")
    lab.on_d(case).must_be("identical")
