"""Each patch: stock failing or corrupting on some release without it, and right with it.

What stock makes of a case is stated per release, so that the day on which a
release mends it shows here, and the patch can go.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpatch.core.releases import FACTS, ReleaseFacts

from .case import Case, EngineSpec, Report
from .host import Lab
from .selection import on_every_release
from .test_like_pairs import pair

pytestmark = pytest.mark.lab


def known_failures() -> list[Case]:
    """Pairs that kvpatch exists for."""
    p, d = pair(EngineSpec(), 32)
    nhd_p, nhd_d = pair(EngineSpec(layout="NHD"), 32)
    share_p, share_d = pair(EngineSpec(layers=34, tensors=5, allocation="shared_tensors"))
    half = {"allocation": "split_half"}
    flashinfer_p, flashinfer_d = pair(EngineSpec("flashinfer", "NHD"))
    return [
        Case("D over-allocated, twice", p, replace(d, tensor_blocks=64)),
        Case("D over-allocated, 3 more", p, replace(d, tensor_blocks=35)),
        Case("P over-allocated, twice", replace(p, tensor_blocks=64), d),
        Case("both over-allocated", replace(p, tensor_blocks=48), replace(d, tensor_blocks=40)),
        Case("D under-allocated", p, replace(d, tensor_blocks=28)),
        Case("34 layers over 5 tensors", share_p, share_d),
        Case("kvcached split-half NHD", replace(nhd_p, **half), replace(nhd_d, **half)),
        Case("kvcached split-half P, plain D", replace(nhd_p, **half), nhd_d),
        Case("FlashInfer split-half", replace(flashinfer_p, **half), replace(flashinfer_d, **half)),
    ]


_CASES = {case.name: case for case in known_failures()}

_ELASTIC = [name for name in _CASES if "allocated" in name]
_SHARED = "34 layers over 5 tensors"
_SPLIT = [name for name in _CASES if "split-half" in name and "plain" not in name]
_MIXED = "kvcached split-half P, plain D"


def pairs_halves(release: str) -> bool:
    """In 0.23 to 0.25 keys and values share a region, and the number of regions tells halves."""
    return FACTS[release].cache_shape != "packed"


def _facts(lab: Lab) -> ReleaseFacts:
    return FACTS[lab.release]


def _counts_tensors(lab: Lab) -> bool:
    """Whether the release counts blocks in the tensors, as kvpatch does everywhere."""
    return not _facts(lab).has_cache_groups


def _both(lab: Lab, name: str) -> tuple[Case, Report, Report]:
    case = _CASES[name]
    return case, lab.run(case), lab.run(case.patched())


@pytest.mark.parametrize("name", on_every_release(_ELASTIC, ["D over-allocated, 3 more"]))
def test_block_count(lab: Lab, name: str) -> None:
    _, stock, patched = _both(lab, name)

    patched.must_be("identical")
    if _counts_tensors(lab):
        stock.must_be("identical")
    else:
        assert stock.outcome in ("refused", "failed", "corrupt"), stock


@pytest.mark.every_release
def test_shared_tensors(lab: Lab) -> None:
    case, stock, patched = _both(lab, _SHARED)

    assert (stock.outcome, patched.outcome) == ("identical", "identical"), (stock, patched)
    if not _facts(lab).registers_shared_tensors_once:
        assert stock.registrations == 2 * case.decode.layers
        assert patched.registrations == 2 * case.decode.tensors
    else:
        assert stock.registrations == patched.registrations <= 2 * case.decode.tensors


@pytest.mark.parametrize("name", on_every_release(_SPLIT, ["kvcached split-half NHD"]))
def test_kvcached_regions(lab: Lab, name: str) -> None:
    case, stock, patched = _both(lab, name)

    patched.must_be("identical")
    if _facts(lab).cache_shape == "keys first" and case.decode.family == "flash":
        stock.must_be("identical")
    else:
        # One release moves bytes that are not its own and dies of it.
        assert stock.outcome in ("corrupt", "failed"), stock


@pytest.mark.parametrize("blocks", [(32, 64), (64, 32)], ids=str)
def test_split_halves_of_unlike_blocks(lab: Lab, blocks: tuple[int, int]) -> None:
    """Their tensors are NHD, whatever layout the release had planned."""
    prefill, decode = (
        EngineSpec(
            "flash", block_tokens=n, planned_blocks=60, tensor_blocks=80, allocation="split_half"
        )
        for n in blocks
    )
    case = Case("split halves", prefill, decode, prompt_tokens=192)

    lab.run(case.patched()).must_be("identical")


def test_a_plain_peer_of_a_split_one_refuses_or_reads_it_rightly(lab: Lab) -> None:
    report = lab.run(_CASES[_MIXED].patched())

    expected = "identical" if pairs_halves(lab.release) else "refused"
    assert report.outcome == expected, report


@pytest.mark.every_release
def test_without_one_patch_its_problem_is_back(lab: Lab) -> None:
    """The patches work by themselves, and it is they that make the difference."""
    case = _CASES["D over-allocated, 3 more"]
    others = ("kvcached_layout", "shared_tensors", "kvcached_regions")
    alone, without = lab.run(case.patched("block_count")), lab.run(case.patched(*others))

    alone.must_be("identical")
    expected = "identical" if _counts_tensors(lab) else "refused"
    assert without.outcome == expected, without
