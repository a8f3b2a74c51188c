"""Memory, planes, and what may be imported."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

import pytest

from kvpatch import geometry
from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.plane import (
    Content,
    Counts,
    Memory,
    Plane,
    Strides,
    names_of_heads,
    planes_of_heads,
    planes_without,
)

from .reference import byte_offset

pytestmark = pytest.mark.geometry

DRAM = Memory("DRAM")


def plane(**changes: object) -> Plane:
    arguments: dict[str, object] = {
        "layer": "model.layers.3.attn",
        "content": Content.KEY,
        "address": 1000,
        "strides_bytes": Strides(block=96, head=48, token=12, channel=4),
        "counts": Counts(blocks=2, heads=2, block_tokens=4, channels=3),
        "item_bytes": 4,
        "first_head": 6,
        "memory": DRAM,
    }
    return Plane(**{**arguments, **changes})  # type: ignore[arg-type]


def parts() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(geometry.__path__))


def test_geometry_imports_neither_torch_nor_vllm() -> None:
    names = ", ".join(f"kvpatch.geometry.{name}" for name in parts())
    script = (
        f"import sys, {names}\n"
        "print(sorted({'torch', 'vllm', 'wrapt', 'nixl'} & {m.split('.')[0] for m in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_package_names_all_its_parts() -> None:
    assert sorted(re.findall(r"^``(\w+)``", geometry.__doc__ or "", re.M)) == parts()


def test_byte_offset_and_span() -> None:
    assert byte_offset(plane(), 1, 0, 2, 1) == 96 + 2 * 12 + 4
    assert plane().span() == (1000, 1000 + 96 + 48 + 3 * 12 + 2 * 4 + 4)
    assert plane().end_head == 8


def test_span_without_the_gap_behind_the_last_block() -> None:
    assert plane(strides_bytes=Strides(500, 48, 12, 4)).span() == (1000, 1000 + 500 + 96)


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": Counts(0, 2, 4, 3)},
        {"counts": Counts(2, 2, 4, 0)},
        {"strides_bytes": Strides(-96, 48, 12, 4)},
        {"item_bytes": 0},
        {"address": -1},
        {"first_head": -1},
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnreadableGeometry, match=r"model\.layers\.3\.attn.*1 or more"):
        plane(**changes)


@pytest.mark.parametrize(
    "strides",
    [
        Strides(96, 48, 12, 3),
        Strides(96, 47, 12, 4),
        Strides(95, 48, 12, 4),
        Strides(0, 48, 12, 4),
        Strides(96, 48, 0, 4),
        Strides(96, 12, 24, 8),
    ],
)
def test_overlapping_strides_are_refused(strides: Strides) -> None:
    with pytest.raises(UnreadableGeometry, match="overlapping") as refused:
        plane(strides_bytes=strides)
    assert str(tuple(strides)) in str(refused.value)
    assert "(2, 2, 4, 3)" in str(refused.value)


def test_the_stride_of_an_axis_of_one_does_not_matter() -> None:
    assert plane(strides_bytes=Strides(96, 0, 12, 4), counts=Counts(2, 1, 4, 3)).span()[1] == 1144


def test_a_gap_that_ends_with_the_last_item_is_no_overlap() -> None:
    """A slice of wider rows: the next head begins right behind the last row's part."""
    sliced = plane(strides_bytes=Strides(88, 44, 12, 4), counts=Counts(2, 2, 4, 2))
    assert sliced.span() == (1000, 1000 + 88 + 44 + 36 + 8)


def test_addresses_that_64_bits_cannot_count_are_refused() -> None:
    with pytest.raises(UnreadableGeometry, match=r"2\*\*63"):
        plane(address=2**63 - 10)


def test_unknown_memory_is_refused() -> None:
    with pytest.raises(UnreadableGeometry, match="DRAM or VRAM, found 'TPU'"):
        Memory("TPU")  # type: ignore[arg-type]
    with pytest.raises(UnreadableGeometry, match="found -1"):
        Memory("VRAM", -1)


def wide(*, is_whole: bool = False) -> Plane:
    """Four heads, of which 8 is the first."""
    strides, counts = Strides(400, 100, 10, 2), Counts(3, 4, 10, 5)
    return plane(
        strides_bytes=strides, counts=counts, item_bytes=2, first_head=8, is_whole=is_whole
    )


def test_heads_of_a_plane() -> None:
    assert planes_of_heads(wide(), range(20)) == [wide()]
    assert planes_of_heads(wide(), [3, 12]) == []
    first, second = planes_of_heads(wide(), {9, 11, 40})
    assert (first.first_head, first.counts.heads, first.address) == (9, 1, 1100)
    assert (second.first_head, second.counts.heads, second.address) == (11, 1, 1300)
    (both,) = planes_of_heads(wide(), {9, 10})
    assert (both.first_head, both.end_head, both.address) == (9, 11, 1100)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_block_that_is_a_whole_has_all_of_its_heads_or_none(count: int) -> None:
    whole, heads = wide(is_whole=True), range(8, 8 + count)
    assert planes_of_heads(whole, heads) == ([whole] if count == 4 else [])
    taken = {one for one in names_of_heads([whole]) if one[2] in heads}
    assert planes_without([whole], taken) == ([] if count == 4 else [whole])
