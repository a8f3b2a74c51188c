"""kvcached's own NIXL patch (its real code) beside kvpatch, in either order.

Alone it refuses its default layout; with kvpatch in the process kvpatch takes its place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from kvpatch.patches import SLUGS

from .case import Case, EngineSpec
from .child import KVCACHEDS_OWN
from .host import Lab

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

#: Tensors that are laid out as kvcached's, of all whose blocks there is memory.
_ROWS = EngineSpec(
    layout="NHD", planned_blocks=24, tensor_blocks=40, layers=3, allocation="contiguous"
)
_HALVES = replace(_ROWS, allocation="split_half")
Order = Literal["before", "after"]


def _spec(spec: EngineSpec, order: Order, *, patched: bool) -> EngineSpec:
    layout = "true" if spec.allocation == "contiguous" else "false"
    settings = ((KVCACHEDS_OWN, order), ("KVCACHED_CONTIGUOUS_LAYOUT", layout))
    return replace(spec, settings=settings, patched=patched)


def _case(spec: EngineSpec, order: Order, *, patched: bool = True) -> Case:
    sides = (_spec(spec, order, patched=patched) for _ in range(2))
    return Case("kvcached's own", *sides, prompt_tokens=107)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("spec", [_ROWS, _HALVES], ids=["rows", "halves"])
def test_kvpatch_takes_its_place(lab: Lab, spec: EngineSpec, order: Order) -> None:
    case = _case(spec, order)

    report = lab.run(case).must_be("identical")
    if spec is _ROWS:
        assert report.descriptors == -(-report.moved_tokens // spec.block_tokens)
        assert report.registrations == 1
    assert lab.run(case, sabotage="shift_block").outcome == "corrupt"


def test_alone_it_refuses_its_own_default_layout(lab: Lab) -> None:
    lab.run(_case(_ROWS, "before", patched=False)).must_be(
        "refused", "requires KVCACHED_CONTIGUOUS_LAYOUT=false"
    )


def test_without_a_patch_that_does_its_part_it_stays_and_kvpatch_refuses(lab: Lab) -> None:
    one = replace(
        _spec(_HALVES, "before", patched=True),
        patches=tuple(slug for slug in SLUGS if slug != "block_count"),
    )

    lab.run(Case("kvcached's own", one, one)).must_be("refused", "kvpatch cannot patch")
