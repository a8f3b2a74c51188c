"""What ``kvpatch plan`` takes an attention backend's cache to be, against the release's classes."""

from __future__ import annotations

from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.geometry.layout_strides import inner_layout_of_axes
from kvpatch.tools.planning.models_and_backends import BACKENDS

from .backend_shapes import CLASSES, MAY_BE_MISSING
from .case import EngineSpec
from .host import Lab
from .stage import Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(cache_shape="packed")]


def test_a_backends_cache_is_what_a_plan_takes_it_for(stage: Stage, lab: Lab) -> None:
    facts = FACTS[lab.release]
    found: dict[str, Any] = stage.start(EngineSpec()).call("backend_shapes")

    assert found.keys() | set(MAY_BE_MISSING) == CLASSES.keys() == BACKENDS.keys()
    for name, shape in found.items():
        backend = BACKENDS[name]
        assert shape["name"] == name
        assert tuple(shape["dims"]) == backend.order(facts).dimensions, name
        for layout, order in shape["orders"].items():
            if "head" in order:
                is_cpu = backend.device == "cpu"  # has one layout
                assert inner_layout_of_axes(order) == ("HND" if is_cpu else layout), name
        if shape["kernel_sizes"] is not None:
            sizes = backend.kernel_sizes(facts)
            assert shape["kernel_sizes"]["exact"] == list(sizes.exact[0]), name
            assert shape["kernel_sizes"]["multiples"] == list(sizes.multiples[0]), name

    # The negative control: FlashAttention's and latents' dimensions are not each other's.
    dims = tuple(found["FLASH_ATTN"]["dims"])
    orders = {name: BACKENDS[name].order(facts) for name in ("FLASH_ATTN", "FLASHMLA")}
    fitting = [name for name, order in orders.items() if order.dimensions == dims]
    assert fitting == ["FLASH_ATTN"]
