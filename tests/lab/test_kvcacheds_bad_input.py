"""Tensors, variables and pages of kvcached's that contradict one another: each is refused.

kvcached's own view code over the lab's stand-in for its compiled part; every refusal says
what was found, what was expected and what to set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from .caches import ODD_LAYER, UNMAPPED
from .case import PEER_BLOCK_SIZE, Case, EngineSpec, Report
from .host import Lab
from .kvcached_cells import LAYOUTS, spec
from .releases import has_named_layouts, states_layout

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

Layout = Literal["contiguous", "split-half"]


def _spec(layout: str, *settings: tuple[str, str]) -> EngineSpec:
    found = spec("flash", LAYOUTS[layout])
    return replace(found, patched=True, settings=settings)


def _run(lab: Lab, prefill: EngineSpec, decode: EngineSpec) -> Report:
    return lab.run(Case("bad input", prefill, decode, prompt_tokens=107))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_the_variable_denies(lab: Lab, layout: str) -> None:
    said, other = ("false", "true") if layout == "contiguous" else ("true", "false")
    contrary, right = (
        _spec(layout, ("KVCACHED_CONTIGUOUS_LAYOUT", value)) for value in (said, other)
    )

    refused, agreed = _run(lab, contrary, contrary), _run(lab, right, right)

    assert refused.outcome == "refused", refused
    assert f"KVCACHED_CONTIGUOUS_LAYOUT={said} and " in refused.detail
    assert "allocation" in refused.detail and "set KVCACHED_CONTIGUOUS_LAYOUT" in refused.detail
    assert agreed.outcome == "identical", agreed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("odd", "said"), [("other", "lie in none of its pools"), ("claims", "says that it lies in")]
)
def test_a_tensor_outside_the_pool(lab: Lab, layout: str, odd: str, said: str) -> None:
    strange = _spec(layout, (ODD_LAYER, odd))
    if has_named_layouts(lab.release):
        said = "unlike sizes"  # the release makes the views, and kvcached marks none

    _run(lab, strange, strange).must_be(
        "refused", "layers.2.", said, "xpected", "ENABLE_KVCACHED=false"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_page_that_is_not_mapped_under_a_descriptor(
    lab: Lab, layout: str, block_tokens: int
) -> None:
    """Between like engines the release reads split halves itself, and is stopped as well."""
    if block_tokens != 16 and layout == "split-half" and not states_layout(lab.release):
        pytest.skip("0.10.0 states no layout: unlike halves are refused at the handshake")
    prefill = _spec(layout)
    told = (PEER_BLOCK_SIZE, str(prefill.block_tokens))  # so that it loads the first prompt
    decode = replace(_spec(layout, (UNMAPPED, "1"), told), block_tokens=block_tokens)

    _run(lab, prefill, decode).must_be(
        "refused", "is not mapped: found the page of zeros", "one of its own for every block"
    )
