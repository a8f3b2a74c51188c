"""Dimension orders: what backends of several releases say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.dimension_order import DimensionOrder

pytestmark = pytest.mark.geometry


def of_one_head(b: int, n: int, h: int, d: int) -> tuple[int, ...]:
    assert h == 1
    return (b, n, d)


def strict_about_sizes(b: int, n: int, h: int, d: int) -> tuple[int, ...]:
    if n % 64 or d % 128:
        raise ValueError("not a size of mine")
    return (b, h, n, 2 * d)


def with_options(b: int, n: int, h: int, d: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
    return (b, n, 584) if cache_dtype_str == "fp8_ds_mla" else (b, n, h, d)


IN_BLOCK, MLA = ("block", "kv", "token", "head", "channel"), ("block", "token", "channel")
PACKED, ROWS = ("block", "head", "token", "packed"), ("block", "token", "head", "channel")
SHAPES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "regions": (lambda b, n, h, d: (2, b, n, h, d), ("kv", *ROWS)),
    "in block": (lambda b, n, h, d: (b, 2, n, h, d), IN_BLOCK),
    "cpu regions": (
        lambda b, n, h, d: (2, b, h, n, d),
        ("kv", "block", "head", "token", "channel"),
    ),
    "packed": (lambda b, n, h, d: (b, h, n, 2 * d), PACKED),
    "packed, strict about sizes": (strict_about_sizes, PACKED),
    "packed with scales": (lambda b, n, h, d: (b, h, n, 2 * (d + 4)), PACKED),
    "mla": (lambda b, n, h, d: (b, n, d), MLA),
    "mla of one head": (of_one_head, MLA),
    "mla of fixed width": (lambda b, n, h, d: (b, n, 656), MLA),
    "tpu": (
        lambda b, n, h, d: (b, n, 2 * h, -(-d // 128) * 128),
        ("block", "token", "packed_head", "channel"),
    ),
    "one vector per head": (lambda b, n, h, d: (b, n, h, d), ROWS),
    "options": (with_options, ROWS),
    "scales behind each row": (lambda b, n, h, d: (b, 2, n, h, d + 4), IN_BLOCK),
}


@pytest.mark.parametrize("name", SHAPES)
def test_probe(name: str) -> None:
    shape, dimensions = SHAPES[name]
    assert DimensionOrder.probe(shape) == DimensionOrder(dimensions)


def test_probe_finds_values_of_a_width_of_their_own() -> None:
    order = DimensionOrder.probe(lambda b, n, h, d: (b, n, h, d + 96))
    assert order == DimensionOrder(("block", "token", "head", "packed"), value_channels=96)


def test_probe_passes_options_on() -> None:
    found = DimensionOrder.probe(with_options, cache_dtype_str="fp8_ds_mla")
    assert found == DimensionOrder(MLA)


@pytest.mark.parametrize(
    "shape",
    [
        lambda b, n, h, d: (2, b, n * h * d),
        lambda b, n, h, d: (1, 1, 1, 1, 1),
        lambda b, n, h, d: (2, 2, b, n, h // 2, d),
        lambda b, n, h, d: (b, 2 * h, n, d // 2 + d // 16),
        lambda b, n, h, d: (b, 2 * h, n, d),
        lambda b, n, h, d: (b, 2, h, d),
        lambda b, n, h, d: (3, b, n, h, d),
        lambda b, n, h, d: (b, n, h, 3 * d),
        lambda b, n, h, d: (b, n, h, d + d // 2),
        lambda b, n, h, d: (b, n, h, d // 8, 8),
        lambda b, n, h, d: (b, n, h, d) if d == 256 else (b, n, h, d, 1),
        lambda b, n, h, d: (),
    ],
)
def test_probe_refuses_what_it_does_not_know(shape: Any) -> None:
    with pytest.raises(UnreadableGeometry, match="unknown dimension order"):
        DimensionOrder.probe(shape)


@pytest.mark.parametrize(
    "dimensions",
    [
        (),
        ("block",),
        ("block", "token", "head", "colour"),
        ("kv", "block", "token", "head", "packed"),
        ("block", "block", "token", "channel"),
        ("kv", "kv", "block", "token", "head", "channel"),
        ("state",),
    ],
)
def test_unknown_orders_are_refused_by_name(dimensions: tuple[str, ...]) -> None:
    with pytest.raises(UnreadableGeometry) as refused:
        DimensionOrder(dimensions)
    assert str(dimensions) in str(refused.value)


def test_widths_without_a_packed_dimension_are_refused() -> None:
    with pytest.raises(UnreadableGeometry, match="key_channels"):
        DimensionOrder(("block", "token", "channel"), key_channels=4)
