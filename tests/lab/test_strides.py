"""Tensors whose strides are not what a release's arithmetic assumes, and nobody said so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Allocation, Case, EngineSpec, Family, Report
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

_SPEC = EngineSpec(planned_blocks=24, layers=3)
_OWN = ("pool", "padded", "uneven")


def _run(lab: Lab, prefill: EngineSpec, decode: EngineSpec) -> Report:
    return lab.run(Case("odd", prefill, decode, prompt_tokens=320))


@pytest.mark.parametrize(
    ("family", "allocation"), [*(("flash", own) for own in _OWN), ("flashinfer", "pool")]
)
def test_blocks_that_lie_elsewhere(lab: Lab, family: Family, allocation: Allocation) -> None:
    """Stock moves other bytes without a word: all of a pool's <= 0.25, all padded ones <= 0.28."""
    spec = replace(_SPEC, family=family, allocation=allocation)
    stock = _run(lab, spec, spec)

    report = _run(lab, spec.on(), spec.on())

    if stock.outcome == "identical":  # what the release gets right is left to it
        report.must_be("identical")
    else:
        report.must_be("refused")
    if stock.outcome == "corrupt":
        assert "bytes apart" in report.detail and "ENABLE_KVCACHED" in report.detail


@pytest.mark.parametrize("family", ["flash", "flashinfer", "mla"])
def test_one_allocation_on_a_numbered_device(lab: Lab, family: Family) -> None:
    """From 0.24 on the release makes one region of it; 0.24 and 0.25 move half of each block."""
    spec = replace(_SPEC, layers=4, family=family, allocation="pool", device="cuda")
    stock = _run(lab, spec, spec)
    if lab.release in ("0.24.0", "0.25.1"):  # the negative control
        stock.must_be("identical" if family == "mla" else "corrupt")

    _run(lab, spec.on(), spec.on()).must_be(
        "identical" if stock.outcome == "identical" else "refused"
    )


@pytest.mark.on(has_cache_groups=True, names_layouts=False)
@pytest.mark.parametrize("family", ["flash", "flashinfer"])
def test_one_tensor_of_all_layers(lab: Lab, family: Family) -> None:
    """The release hands it over under the first layer's name, and reads it itself."""
    spec = replace(_SPEC, family=family, allocation="all_layers")
    _run(lab, spec, spec).must_be("identical")

    _run(lab, spec.on(), spec.on()).must_be("identical")
    _run(lab, spec, spec.on()).must_be("identical")


@pytest.mark.on(has_cache_groups=True, names_layouts=False)
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_one_tensor_of_all_layers_over_unlike_ranks(
    lab: Lab, layout: str, ranks: tuple[int, int]
) -> None:
    """<= 0.19 stock reads a share of NHD's tokens for a rank's heads."""
    p, d = (replace(_SPEC, layout=layout, allocation="all_layers", tp_size=n) for n in ranks)
    stock = _run(lab, p, d)
    if layout == "NHD" and Version(lab.release) < Version("0.20"):
        stock.must_be("corrupt")

    is_read = stock.outcome == "identical"
    _run(lab, p, d.on()).must_be("identical" if is_read else "refused")


@pytest.mark.on(states_layout=True)
def test_an_order_that_is_not_the_backends(lab: Lab) -> None:
    """Two of one allocator are like each other; beside a plain engine P says what it has."""
    turned = replace(_SPEC, allocation="permuted")
    _run(lab, turned, turned).must_be("identical")
    _run(lab, turned, _SPEC).must_be("corrupt")

    _run(lab, turned.on(), turned.on()).must_be("identical")
    _run(lab, turned.on(), _SPEC.on()).must_be("identical")
    _run(lab, _SPEC, turned.on()).must_be("refused", "allocator")


# 0.11.0's connector does not know Triton's shape, and stock fails over it.
@pytest.mark.on(has=lambda release: release != "0.11.0")
@pytest.mark.parametrize(("p", "d"), [(16, 64), (64, 16)])
def test_backends_that_keep_their_order_whatever_is_stated(lab: Lab, p: int, d: int) -> None:
    """Triton's tensors are NHD <= 0.17, and its handshake says HND: heads were read for tokens."""
    spec = replace(_SPEC, family="triton")

    report = _run(lab, replace(spec, block_tokens=p), replace(spec, block_tokens=d).on()).must_be(
        "identical"
    )
    assert report.moved_tokens > 0, report


@pytest.mark.parametrize("ranks", [(1, 4), (2, 4), (4, 2), (4, 8)])
@pytest.mark.parametrize(
    ("family", "layout"), [("triton", "HND"), ("flash", "NHD"), ("flash", "HND")]
)
def test_a_rank_of_one_head_shows_no_order(
    lab: Lab, family: Family, layout: str, ranks: tuple[int, int]
) -> None:
    """Stock takes NHD for HND (<= 0.19), and nothing in D's blocks of one head says which it is."""
    if (lab.release, family) == ("0.11.0", "triton"):
        pytest.skip("its connector does not know Triton's shape")
    p, d = (replace(_SPEC, family=family, layout=layout, tp_size=size) for size in ranks)
    case = Case(f"{family} {layout}, ranks {ranks}", p, d, prompt_tokens=320)
    stock, report = lab.run(case), lab.on_d(case)

    assert report.must_be("identical").moved_tokens > 0, report
    if ranks[1] == 4 and layout == "NHD" and Version(lab.release) < Version("0.20"):
        stock.must_be("corrupt")
    if stock.outcome == "identical":  # what the release gets right is left to it
        assert report.descriptors == stock.descriptors, (stock, report)
