"""Caches whose blocks are no rows of tokens: moved whole between like blocks, else refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.patches import SLUGS

from .case import Case, EngineSpec
from .host import Lab
from .releases import states_block_size
from .test_host_buffer import ALWAYS
from .test_like_pairs import tokens_to_move
from .unlike import told

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

# -- indexers (DeepSeek-V3.2, GLM-5): all values of a block, and then all scales --------------

INDEXED = EngineSpec(
    "mla", "NHD", block_tokens=64, planned_blocks=24, layers=4, head_dim=64, has_indexer=True
)


@pytest.fixture
def _has_indexers(lab: Lab) -> None:
    if Version(lab.release) < Version("0.11"):
        pytest.skip("this release has no indexers")


def _indexed(prefill: dict[str, object], decode: dict[str, object], **more: object) -> Case:
    name = f"indexer caches, P {prefill}, D {decode}"
    sides = (replace(INDEXED, **side) for side in (prefill, decode))  # type: ignore[arg-type]
    return Case(name, *sides, **{"prompt_tokens": 100, **more})  # type: ignore[arg-type]


@pytest.mark.usefixtures("_has_indexers")
@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2)])
def test_indexers_of_unlike_ranks(lab: Lab, p_tp: int, d_tp: int) -> None:
    """The last block of a prompt is not full, and its scales lie at its end."""
    case = told(_indexed({"tp_size": p_tp}, {"tp_size": d_tp}), lab.release)

    report = lab.run(case.patched(*SLUGS, prefill=False))

    assert report.outcome == "identical", report
    assert report.moved_tokens == tokens_to_move(case, lab.release)


@pytest.mark.usefixtures("_has_indexers")
@pytest.mark.parametrize(("p_parts", "d_parts"), [(2, 1), (1, 2)])
def test_indexers_of_unlike_logical_blocks(lab: Lab, p_parts: int, d_parts: int) -> None:
    """Kernel blocks are alike: each moves whole, the last one too."""
    if not states_block_size(lab.release):
        pytest.skip("this release cuts no blocks")
    p, d = ({"block_tokens": 64 * parts, "parts": parts} for parts in (p_parts, d_parts))
    case = told(_indexed(p, d, prompt_tokens=300, prefix_hit_tokens=128), lab.release)

    report = lab.run(case.patched(*SLUGS, prefill=False))

    assert report.outcome == "identical", report
    assert report.moved_tokens == tokens_to_move(case, lab.release)


@pytest.mark.usefixtures("_has_indexers")
def test_a_spoilt_indexer_is_noticed(lab: Lab) -> None:
    parts = 2 if states_block_size(lab.release) else 1
    case = told(_indexed({}, {"block_tokens": 64 * parts, "parts": parts}), lab.release)

    report = lab.run(case.patched(*SLUGS, prefill=False), sabotage="skip_state")

    assert report.outcome == "corrupt", report


@pytest.mark.usefixtures("_has_indexers")
@pytest.mark.parametrize(("p", "d"), [(64, 32), (32, 64)])
def test_indexers_of_unlike_kernel_blocks_are_refused(lab: Lab, p: int, d: int) -> None:
    if Version(lab.release) >= Version("0.18"):
        pytest.skip("this release's worker cuts an indexer's blocks into 64 tokens, or none")
    case = told(_indexed({"block_tokens": p}, {"block_tokens": d}), lab.release)

    report = lab.run(case.patched(*SLUGS, prefill=False))

    assert report.outcome == "refused", report
    assert "an indexer's values" in report.detail, report


@pytest.mark.usefixtures("_has_indexers")
@pytest.mark.parametrize("side", ["P", "D", "both"])
def test_indexers_behind_a_host_buffer(lab: Lab, side: str) -> None:
    on = {"patched": True, "patches": SLUGS, "settings": ALWAYS}
    p, d = ({} if side == "D" else {**on, "own_scheduler": True}, {} if side == "P" else on)

    report = lab.run(told(_indexed(p, d), lab.release))

    assert report.outcome == "identical", report
