"""What ``kvpatch plan`` takes an attention backend's cache to be, against the release's classes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.geometry.layout_strides import inner_layout_of_axes
from kvpatch.tools.planning.models_and_backends import BACKENDS
from tests.releases.cache import tree

from .backend_shapes import CLASSES, MAY_BE_MISSING
from .host import ANCESTOR, Lab, environment

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(cache_shape="packed")]


@cache
def _shapes(release: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        variables = environment(tree(release), Path(folder))
        printed = ANCESTOR.run(variables, Path(folder), "tests.lab.backend_shapes")
    last = printed.rstrip().rpartition("\n")[2]
    assert last.startswith("{"), printed[-2000:]
    found: dict[str, Any] = json.loads(last)
    return found


def test_a_backends_cache_is_what_a_plan_takes_it_for(lab: Lab) -> None:
    facts = FACTS[lab.release]
    found = _shapes(lab.release)

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


def test_negative_control_another_releases_cache_is_noticed(lab: Lab) -> None:
    """FlashAttention's and latents' dimensions are not each other's."""
    shape = _shapes(lab.release)["FLASH_ATTN"]
    orders = {name: BACKENDS[name].order(FACTS[lab.release]) for name in ("FLASH_ATTN", "FLASHMLA")}

    fitting = [name for name, order in orders.items() if order.dimensions == tuple(shape["dims"])]

    assert fitting == ["FLASH_ATTN"]
