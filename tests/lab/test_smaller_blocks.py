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


@pytest.mark.on(since="0.32")
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("layout", ["BLNHC", "BHLNC"])
def test_layers_that_mingle_in_a_head_or_token(lab: Lab, layout: str, heads: int) -> None:
    """Heads are joined in the order of BLHNC; a single one on a rank has the same bytes."""
    case = _case(32)
    sides = (
        replace(side, layout=layout, kv_heads=heads, tp_size=2)
        for side in (case.prefill, case.decode)
    )
    case = Case(f"{layout}, {heads} heads", *sides, 150)
    has_one = heads == 2

    lab.run(case).must_be("identical" if has_one else "corrupt")
    if has_one:
        lab.on_d(case).must_be("identical")
    else:
        lab.on_d(case).must_be("refused", f"layout {layout} in the order of BLHNC")


@pytest.mark.parametrize(("heads", "layout"), [(1, "HND"), (4, "HND"), (4, "NHD")])
def test_a_draft_models_heads_beside_latents(lab: Lab, heads: int, layout: str) -> None:
    """They are joined as latents: the same bytes where a rank has one, and in NHD, from 0.32 on."""
    case = _case(32)
    model = {"family": "mla", "head_dim": 64, "draft_shape": (heads, 64 // heads)}
    sides = (
        replace(side, **model, dtype="bfloat16", tp_size=1, layout=layout)
        for side in (case.prefill, case.decode)
    )
    case = Case(f"{heads} heads beside latents, {layout}", *sides, 150)
    is_read = Version(lab.release) >= Version("0.32") and (heads == 1 or layout == "NHD")

    lab.run(case).must_be("identical" if is_read else "corrupt")
    if is_read:
        lab.on_d(case).must_be("identical")
    else:
        lab.on_d(case).must_be("refused", "a draft model's heads as if they held latents")


@pytest.mark.on(since="0.30")
@pytest.mark.parametrize("p_tokens", [32, 64])
@pytest.mark.parametrize("layouts", [("HND", "NHD"), ("NHD", "HND"), ("BLHNC", "NHD")])
def test_a_draft_models_heads_in_another_order(
    lab: Lab, layouts: tuple[str, str], p_tokens: int
) -> None:
    """Beside latents vLLM compares no layouts, of blocks alike neither."""
    case = _case(p_tokens)
    model = {"family": "mla", "head_dim": 64, "draft_shape": (4, 32), "tp_size": 2}
    sides = (
        replace(side, **model, dtype="bfloat16", layout=layout)
        for side, layout in zip((case.prefill, case.decode), layouts, strict=True)
    )
    case = Case(f"a draft model, {layouts}", *sides, 150)

    lab.run(case).must_be("corrupt")
    lab.on_d(case).must_be("refused", "another order" if p_tokens == 64 else "")


#: Tokens of P's and of D's blocks, all of kernel blocks of 64.
_CUTS = [(64, 128), (64, 192), (128, 64), (128, 192)]


@pytest.mark.parametrize("windows", [(0,), (0, 40), (40,)], ids=["full", "some windows", "windows"])
@pytest.mark.parametrize(("prompt_tokens", "is_hit"), [(129, False), (380, False), (380, True)])
@pytest.mark.parametrize(("p_tokens", "d_tokens"), _CUTS)
def test_like_kernel_blocks_of_unlike_blocks(
    lab: Lab,
    p_tokens: int,
    d_tokens: int,
    prompt_tokens: int,
    is_hit: bool,  # noqa: FBT001
    windows: tuple[int, ...],
) -> None:
    """The release pairs them from the ends of two lists, whose last blocks end elsewhere.

    It ends the worker where P's list is the shorter. Where both end with one token it is right.
    """
    if is_hit and windows == (40,):
        pytest.skip("D finds no prefix")
    model = {"family": "flashinfer", "tp_size": 1, "planned_blocks": 60, "window_tokens": windows}
    prefill, decode = (
        replace(side, **model, block_tokens=tokens, parts=tokens // 64)
        for side, tokens in zip(
            (_case(64).prefill, _case(64).decode), (p_tokens, d_tokens), strict=True
        )
    )
    hit = d_tokens * is_hit
    case = Case(f"{p_tokens} to {d_tokens}", prefill, decode, prompt_tokens, hit)

    stock, patched = lab.run(case), lab.on_d(case)

    assert patched.outcome == ("identical" if stock.outcome == "identical" else "refused"), patched
    if -(-prompt_tokens // p_tokens) * p_tokens != -(-prompt_tokens // d_tokens) * d_tokens:
        assert stock.outcome in ("corrupt", "failed")
        patched.must_be("refused", "kernel blocks")


@pytest.mark.on(since="0.29")
@pytest.mark.parametrize("contexts", [(1, 2), (2, 2)])
@pytest.mark.parametrize(("p_tokens", "d_tokens"), _CUTS)
def test_like_kernel_blocks_whose_tokens_ranks_share_out(
    lab: Lab, p_tokens: int, d_tokens: int, contexts: tuple[int, int]
) -> None:
    model = EngineSpec(family="flashinfer", kv_heads=2, tp_size=4, planned_blocks=60)
    prefill, decode = (
        replace(model, block_tokens=tokens, parts=tokens // 64, contexts=size)
        for tokens, size in zip((p_tokens, d_tokens), contexts, strict=True)
    )
    case = Case(f"{p_tokens} to {d_tokens}, contexts", prefill, decode, 300)

    lab.run(case).must_be("failed")
    lab.on_d(case).must_be("refused", "ranks share out a block's tokens")


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
