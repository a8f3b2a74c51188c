"""What ``kvpatch plan`` takes an attention backend's cache to be, against the release's classes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.geometry.layout_strides import inner_layout_of_axes
from kvpatch.planning.backends import BACKENDS
from tests.releases.cache import tree

from .backend_shapes import CLASSES, MAY_BE_MISSING
from .host import Lab, environment

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]


@cache
def _shapes(release: str, home: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.lab.backend_shapes"],
        capture_output=True,
        text=True,
        env=environment(tree(release), home),
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_a_backends_cache_is_what_a_plan_takes_it_for(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    facts = FACTS[lab.release]
    found = _shapes(lab.release, tmp_path_factory.getbasetemp())

    assert found.keys() | set(MAY_BE_MISSING) == CLASSES.keys() == BACKENDS.keys()
    for name, shape in found.items():
        backend = BACKENDS[name]
        assert shape["name"] == name
        assert tuple(shape["dims"]) == backend.order(facts).dimensions, name
        for layout, order in shape["orders"].items():
            if "head" in order:
                assert inner_layout_of_axes(order) == backend.inner_layout(layout, facts), name
        if shape["kernel_sizes"] is not None:
            sizes = backend.kernel_sizes(facts)
            assert shape["kernel_sizes"]["exact"] == list(sizes.exact[0]), name
            assert shape["kernel_sizes"]["multiples"] == list(sizes.multiples[0]), name


def test_negative_control_another_releases_cache_is_noticed(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """FlashAttention's has had three shapes."""
    shape = _shapes(lab.release, tmp_path_factory.getbasetemp())["FLASH_ATTN"]
    shapes = {BACKENDS["FLASH_ATTN"].order(FACTS[r]) for r in ("0.22.1", "0.25.1", "0.33.0")}

    fitting = [order for order in shapes if order.dimensions == tuple(shape["dims"])]

    assert len(shapes) == 3
    assert len(fitting) == 1
