"""Hybrid models over kvcached: attention and recurrent state (Mamba2) in one pool.

kvcached's own code makes the views of both. P and D run the release's own scheduler, which
has P compute all tokens but the last (from 0.19 on): the state is the one behind them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS

from .case import Case, EngineSpec, StateMode
from .host import Lab
from .kvcached_cells import LAYOUTS
from .releases import has_named_layouts
from .selection import some_of

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.19")]

_PROMPT_TOKENS = 300


def _spec(layout: str, block_tokens: int = 32) -> EngineSpec:
    found = EngineSpec(
        layout="NHD",
        block_tokens=block_tokens,
        planned_blocks=48,
        layers=4,
        kv_heads=2,
        head_dim=16,
        has_state=True,
        patched=True,
    )
    return replace(found, allocation=LAYOUTS[layout], tensor_blocks=96) if layout else found


@pytest.mark.parametrize(
    ("p", "p_tokens", "d", "d_tokens"),
    [
        ("contiguous", 32, "contiguous", 32),
        ("split-half", 32, "split-half", 32),
        ("split-half", 32, "", 32),
        ("", 32, "split-half", 32),
        ("contiguous", 32, "", 32),
        ("", 32, "contiguous", 32),
        ("split-half", 32, "contiguous", 32),
        ("contiguous", 64, "contiguous", 32),
        ("contiguous", 32, "", 64),
        ("", 32, "contiguous", 64),
        ("", 64, "", 32),
        ("", 32, "", 64),
    ],
)
def test_state_moves_with_attention(lab: Lab, p: str, p_tokens: int, d: str, d_tokens: int) -> None:
    """A state has the page of a block, whose bytes go by its tokens: its own bytes move."""
    case = Case("state", _spec(p, p_tokens), _spec(d, d_tokens), _PROMPT_TOKENS)

    report = lab.run(case).must_be("identical")
    assert report.moved_tokens >= _PROMPT_TOKENS - 1
    if p == d == "contiguous" and p_tokens == d_tokens:
        assert report.registrations == 1
        assert report.descriptors == -(-_PROMPT_TOKENS // 32) + 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_the_backend_cuts(lab: Lab, layout: str) -> None:
    """Two kernel blocks are one block of state's."""
    spec = replace(_spec(layout, 128), family="flashinfer", device="cuda", parts=2)

    report = lab.run(Case("cut", spec, spec, _PROMPT_TOKENS))

    if has_named_layouts(lab.release) and layout == "contiguous":
        # By kvcached, whose rows it cannot cut.
        report.must_be("refused", "KVCachedConfigError: vLLM cannot split 128-token blocks")
        return
    report.must_be("identical")


def test_like_plain_pools_stay_on_the_releases_path(lab: Lab) -> None:
    case = Case("like", _spec(""), _spec(""), _PROMPT_TOKENS)

    report, stock = lab.run(case), lab.run(case.stock())

    assert report.outcome == stock.outcome == "identical", (report, stock)
    assert report.descriptors == stock.descriptors


def _cut(block_tokens: int) -> EngineSpec:
    parts = block_tokens // 64
    return replace(_spec("", block_tokens), family="flashinfer", device="cuda", parts=parts)


def _finely_cut(block_tokens: int) -> EngineSpec:
    """Into kernel blocks of 16."""
    return replace(_cut(block_tokens), parts=block_tokens // 16, state_tokens=640)


@pytest.mark.parametrize(
    ("p", "d", "prompt"),
    [
        # A page of states is two of D's kernel blocks and three of P's.
        (_cut(192), _cut(128), 100),
        (_cut(192), _cut(128), _PROMPT_TOKENS),
        (_cut(128), _cut(64), _PROMPT_TOKENS),
        (_cut(128), _cut(128), _PROMPT_TOKENS),
        # 35 kernel blocks to one side's blocks and 33 to the other's: a prompt ends in the first.
        (_finely_cut(560), _finely_cut(528), 450),
        (_finely_cut(528), _finely_cut(560), 450),
    ],
    ids=lambda one: str(getattr(one, "block_tokens", one)),
)
def test_blocks_that_both_backends_cut(lab: Lab, p: EngineSpec, d: EngineSpec, prompt: int) -> None:
    report = lab.run(Case("cut", p, d, prompt)).must_be("identical")
    assert report.moved_tokens >= prompt - 1


@pytest.mark.parametrize("p", ["", "contiguous"])
@pytest.mark.parametrize(("p_mode", "d_mode"), [("align", "none"), ("all", "all")])
def test_states_that_a_prefix_cache_keeps(
    lab: Lab, p: str, p_mode: StateMode, d_mode: StateMode
) -> None:
    """P has a place for a state at each block's end, and one of them is to be read."""
    if p_mode == "all" and Version(lab.release) >= Version("0.33"):
        pytest.skip("this release keeps states in the mode align alone")
    prefill = replace(_spec(p, 64), state_mode=p_mode, planned_blocks=64)
    decode = replace(_spec(""), state_mode=d_mode, planned_blocks=64)

    report = lab.run(Case("kept", prefill, decode, _PROMPT_TOKENS)).must_be("identical")
    assert report.moved_tokens >= _PROMPT_TOKENS - 1


def test_states_of_unlike_ranks_are_refused(lab: Lab) -> None:
    """Each rank has a share of a state."""
    prefill = replace(_spec("contiguous"), tp_size=2)

    lab.run(Case("ranks", prefill, _spec(""), _PROMPT_TOKENS)).must_be(
        "refused", "recurrent state in kvcached's contiguous layout"
    )


@pytest.mark.on(has_channels_first=True)
@pytest.mark.parametrize(
    ("d", "ranks", "kind"),
    some_of(LAYOUTS, [(2, 1), (1, 2)], ["mamba2", "mamba2, one group"]),
    ids=str,
)
def test_states_of_unlike_ranks_come_into_a_pool(
    lab: Lab, d: str, ranks: tuple[int, int], kind: str
) -> None:
    """P is plain, whose ranks' shares follow from its regions."""
    p_ranks, d_ranks = ranks
    prefill = replace(_spec("", 64), tp_size=p_ranks, state_kind=kind)
    case = Case("ranks", prefill, replace(_spec(d), tp_size=d_ranks, state_kind=kind), 300)

    lab.run(case).must_be("identical")


@pytest.mark.parametrize(("p", "d"), [("contiguous", ""), ("", "contiguous")])
def test_models_that_begin_with_a_state(lab: Lab, p: str, d: str) -> None:
    """Most do: from 0.30 on its name is that of the region, attention's in it too."""
    specs = (replace(_spec(layout), state_first=True) for layout in (p, d))
    case = Case("first", *specs, _PROMPT_TOKENS)

    lab.run(case).must_be("identical")


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize(
    ("p", "d", "state_first"),
    [
        ("BLNHC", "BLNHC", False),
        ("BLHNC", "BLHNC", True),
        ("BLNHC", "contiguous", True),
        ("contiguous", "BLNHC", False),
    ],
)
def test_vllms_own_rows(lab: Lab, p: str, d: str, state_first: bool) -> None:
    """From 0.29 on vLLM has such a pool too, whose states stock reads from other places."""
    prefill, decode = (
        replace(
            _spec(layout) if layout == "contiguous" else replace(_spec(""), layout=layout),
            state_first=state_first,
        )
        for layout in (p, d)
    )
    case = Case("rows", prefill, decode, _PROMPT_TOKENS)

    report = lab.run(case).must_be("identical")
    assert report.descriptors == -(-_PROMPT_TOKENS // 32) + 1
    if p == d:
        stock = lab.run(case.stock())
        stock.must_be("corrupt")
        assert stock.wrong_elements > 0


@pytest.mark.on(names_layouts=True)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layout": "BLNHC", "kv_heads": 1}, id="one head"),
        pytest.param({"layout": "BLHNC", "family": "mla", "head_dim": 64}, id="latents"),
    ],
)
def test_rows_of_pages_in_one_piece(lab: Lab, changes: dict[str, Any]) -> None:
    """0.29 makes a region of a whole row of these, and looks for states elsewhere."""
    spec = replace(_spec(""), state_kind="gated delta net", **changes)
    case = Case("rows", spec, spec, _PROMPT_TOKENS)

    is_wrong = not FACTS[lab.release].names_regions
    lab.run(case.stock()).must_be("corrupt" if is_wrong else "identical")
    lab.run(case.patched()).must_be("identical")


LATENTS = replace(
    _spec(""), layout="BLHNC", family="mla", head_dim=64, state_kind="kimi delta attention"
)
#: P and D of models with latents beside states, which stock reads whatever is registered first.
PAIRS = {
    "alike": (LATENTS, LATENTS),
    "BLNHC": (replace(LATENTS, layout="BLNHC"), replace(LATENTS, layout="BLNHC")),
    "to LBHNC": (LATENTS, replace(LATENTS, layout="LBHNC")),
    "from LBHNC": (replace(LATENTS, layout="LBHNC"), LATENTS),
    "of two ranks": (replace(LATENTS, tp_size=2), LATENTS),
}


@pytest.mark.on(names_regions=True)
@pytest.mark.parametrize("state_first", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_states_in_rows_of_latents(lab: Lab, pair: str, state_first: bool) -> None:
    """Stock takes the stride of the latents that begin where a state does (from 0.30 on)."""
    p, d = (replace(side, state_first=state_first) for side in PAIRS[pair])
    case = Case(pair, p, d, _PROMPT_TOKENS)

    lab.run(case.stock()).must_be("identical")
    lab.run(case).must_be("identical")
    lab.on_d(case).must_be("identical")
    lab.run(replace(case, decode=replace(d, patched=False))).must_be("identical")


@pytest.mark.on(names_regions=True)
@pytest.mark.parametrize("pair", PAIRS)
def test_states_in_rows_of_smaller_latents(lab: Lab, pair: str) -> None:
    p, d = (replace(side, state_first=True) for side in PAIRS[pair])

    case = Case(pair, p, replace(d, block_tokens=64), _PROMPT_TOKENS)

    lab.run(case).must_be("identical")


@pytest.mark.on(names_layouts=True)
def test_rows_beside_a_layer_without_a_cache_of_its_own(lab: Lab) -> None:
    spec = replace(_spec(""), layout="BLNHC", sharing_layers=1)
    case = Case("rows", spec, spec, _PROMPT_TOKENS)

    lab.run(case.stock()).must_be("corrupt")
    lab.run(case).must_be("refused", "has no cache of its own")
