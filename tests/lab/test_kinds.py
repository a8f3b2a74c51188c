"""Caches whose blocks are no rows of tokens: moved whole between like blocks, else refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec
from .host import Lab
from .releases import has_named_layouts
from .test_host_buffer import ALWAYS
from .test_like_pairs import tokens_to_move

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

# -- indexers (DeepSeek-V3.2, GLM-5): all values of a block, and then all scales --------------

INDEXED = EngineSpec(
    "mla", "NHD", block_tokens=64, planned_blocks=24, layers=4, head_dim=64, has_indexer=True
)


def _pair(
    spec: EngineSpec, prefill: dict[str, object], decode: dict[str, object], **more: object
) -> Case:
    name = f"{spec.family}, P {prefill}, D {decode}"
    sides = (replace(spec, **side) for side in (prefill, decode))  # type: ignore[arg-type]
    return Case(name, *sides, **{"prompt_tokens": 150, **more})  # type: ignore[arg-type]


@pytest.mark.on(since="0.11")
@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2)])
def test_indexers_of_unlike_ranks(lab: Lab, p_tp: int, d_tp: int) -> None:
    """The last block of a prompt is not full, and its scales lie at its end."""
    case = _pair(INDEXED, {"tp_size": p_tp}, {"tp_size": d_tp})

    lab.on_d(case).must_be("identical", moved=tokens_to_move(case, lab.release))


@pytest.mark.on(since="0.30")  # else: a cache of one head has one layout
@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 2), (1, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize(("p", "d"), [("BLHNC", "HND"), ("BLHNC", "BLNHC")])
def test_indexers_of_unlike_layouts(lab: Lab, p: str, d: str, p_tp: int, d_tp: int) -> None:
    """Each rank has all of what an indexer holds, however many heads its model has."""
    sides: tuple[dict[str, object], ...] = tuple(
        {"layout": layout, "tp_size": ranks} for layout, ranks in ((p, p_tp), (d, d_tp))
    )
    case = _pair(INDEXED, *sides, prefix_hit_tokens=64)

    lab.on_d(case).must_be("identical", moved=tokens_to_move(case, lab.release))


@pytest.mark.on(states_block_size=True)
@pytest.mark.on(since="0.11")
@pytest.mark.parametrize(("p_parts", "d_parts"), [(2, 1), (1, 2)])
def test_indexers_of_unlike_logical_blocks(lab: Lab, p_parts: int, d_parts: int) -> None:
    """Kernel blocks are alike: each moves whole, the last one too."""
    p, d = ({"block_tokens": 64 * parts, "parts": parts} for parts in (p_parts, d_parts))
    case = _pair(INDEXED, p, d, prompt_tokens=300, prefix_hit_tokens=128)

    lab.on_d(case).must_be("identical", moved=tokens_to_move(case, lab.release))


@pytest.mark.on(before="0.18")
@pytest.mark.on(since="0.11")
@pytest.mark.parametrize(("p", "d"), [(64, 32), (32, 64)])
def test_indexers_of_unlike_kernel_blocks_are_refused(lab: Lab, p: int, d: int) -> None:
    case = _pair(INDEXED, {"block_tokens": p}, {"block_tokens": d})

    lab.on_d(case).must_be("refused", "an indexer's values")


@pytest.mark.on(since="0.11")
@pytest.mark.parametrize("side", ["P", "D", "both"])
def test_indexers_behind_a_host_buffer(lab: Lab, side: str) -> None:
    on = {"patched": True, "settings": ALWAYS}
    p, d = ({} if side == "D" else {**on, "own_scheduler": True}, {} if side == "P" else on)

    lab.run(_pair(INDEXED, p, d)).must_be("identical")


# -- slots that each hold all heads: B12X (0.30 on) --------------------------------------------


_SLOTTED = EngineSpec("b12x", block_tokens=64, planned_blocks=24, head_dim=64)
_MIXED = {
    "ranks and blocks": ({"block_tokens": 128, "tp_size": 2}, {"tp_size": 4}),
    "ranks": ({"tp_size": 2}, {"tp_size": 4}),
    "blocks": ({}, {"block_tokens": 128}),
}


@pytest.mark.on(since="0.30")
@pytest.mark.parametrize("name", _MIXED)
def test_slots_of_all_heads_are_never_cut(lab: Lab, name: str) -> None:
    """Stock reads half of a block, all heads' keys, for half of the heads."""
    lab.on_d(_pair(_SLOTTED, *_MIXED[name])).must_be("refused", "two slots")


# -- AITER's FlashAttention with shuffled keys (0.15 on), which calls itself FLASH_ATTN ---------


@pytest.fixture
def shuffled(lab: Lab) -> EngineSpec:
    """Tiles of 16 tokens; slots of all heads from 0.29 on."""
    version = Version(lab.release)
    if version < Version("0.15") or Version("0.26") <= version < Version("0.29"):
        pytest.skip("this release does not shuffle keys, or in packed blocks")
    layout = "HND" if has_named_layouts(lab.release) else "NHD"
    common = {"planned_blocks": 48, "head_dim": 32, "dtype": "fp8", "shuffles": True}
    return EngineSpec("aiter", layout, **common)  # type: ignore[arg-type]


def test_shuffled_keys_are_never_rows(lab: Lab, shuffled: EngineSpec) -> None:
    """P's blocks have other tokens, or other heads where slots hold all of them."""
    if has_named_layouts(lab.release):
        prefill, decode = replace(shuffled, tp_size=2), shuffled
    else:
        prefill, decode = replace(shuffled, block_tokens=32, shuffles=False), shuffled
    case = Case("shuffled keys", prefill, decode, prompt_tokens=150)

    lab.on_d(case).must_be("refused", "move whole")


def test_shuffled_keys_behind_a_host_buffer(lab: Lab, shuffled: EngineSpec) -> None:
    """The last block of a prompt is not full: none of it is left out, nor zeroed."""
    on = {"patched": True, "settings": ALWAYS}
    case = Case("shuffled keys, host buffer", shuffled, replace(shuffled, **on), prompt_tokens=150)

    lab.run(case).must_be("identical")


@pytest.mark.on(names_layouts=True)
def test_shuffled_keys_of_unlike_logical_blocks(lab: Lab, shuffled: EngineSpec) -> None:
    prefill = replace(shuffled, block_tokens=48, parts=3)
    case = Case("shuffled keys, P 48, D 16", prefill, shuffled, prompt_tokens=150)

    lab.on_d(case).must_be("identical")


@pytest.mark.on(since="0.14", before="0.26")  # else: layouts are told, or no such backend
@pytest.mark.parametrize(("family", "layout"), [("aiter", "HND"), ("flash", "NHD")])
def test_one_head_does_not_tell_the_layout(lab: Lab, family: str, layout: str) -> None:
    """On releases <= 0.25 AITER's blocks are NHD, and called HND, as a connector asks."""
    prefill = EngineSpec(family, layout, block_tokens=32)  # type: ignore[arg-type]
    decode = replace(prefill, block_tokens=16, tp_size=4)
    case = Case(f"{family}, called {layout}", prefill, decode, prompt_tokens=150)

    lab.on_d(case).must_be("identical")
