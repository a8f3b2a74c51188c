"""Placements that differ in their addresses alone are one, and reach the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.geometry.merged_placements import merged
from kvpatch.geometry.plane_copies import CopyAxis, CopyStrides
from kvpatch.geometry.segments import Segments
from kvpatch.geometry.staged_plan import Placement

_ONE = np.zeros(1, dtype=np.int64)
_SEGMENTS = Segments(_ONE, _ONE, _ONE, _ONE, _ONE + 1)
_STRIDES = CopyStrides(2, CopyAxis(4, 64, 64), CopyAxis(16, 4, 4), (CopyAxis(2, 2, 2),))


def placement(offset: int, address: int, segments: Segments = _SEGMENTS) -> Placement:
    return Placement("layer", offset, address, _STRIDES, segments)


def places(placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """(offset, address) of all that these stand for."""
    found = []
    for one in placements:
        for steps in itertools.product(*(range(axis.size) for axis in one.layers)):
            pairs = list(zip(steps, one.layers, strict=True))
            offset = sum(step * axis.remote_stride for step, axis in pairs)
            address = sum(step * axis.local_stride for step, axis in pairs)
            found.append((one.staging_offset + offset, one.local_address + address))
    return sorted(found)


def test_keys_and_values_of_80_layers_are_one() -> None:
    layers = [
        placement(layer * 300 + half * 100, 10_000 + layer * 5_000 + half * 2_000)
        for layer in range(80)
        for half in range(2)
    ]

    (one,) = merged(layers)

    assert one.layers == (CopyAxis(80, 300, 5_000), CopyAxis(2, 100, 2_000))
    assert places([one]) == places(layers)


def test_a_layer_elsewhere_is_one_by_itself() -> None:
    layers = [placement(layer * 300, 10_000 + layer * 5_000) for layer in range(10)]
    layers[7] = placement(7 * 300, 10_000 + 7 * 5_000 + 64)

    found = merged(layers)

    assert len(found) == 3
    assert places(found) == places(layers)


def test_other_tokens_are_never_merged() -> None:
    others = Segments(_ONE, _ONE, _ONE + 1, _ONE, _ONE + 1)

    assert len(merged([placement(0, 0), placement(300, 5_000, others)])) == 2


def test_addresses_that_fall_are_left_as_they_are() -> None:
    """As torch's strides are never negative."""
    layers = [placement(layer * 300, 50_000 - layer * 5_000) for layer in range(4)]

    found = merged(layers)

    assert all(axis.remote_stride > 0 for one in found for axis in one.layers)
    assert places(found) == places(layers)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=24, unique=True)
)
def test_any_places_stay_what_they_are(drawn: list[tuple[int, int]]) -> None:
    layers = [placement(offset * 100, address * 1_000) for offset, address in drawn]

    assert places(merged(layers)) == places(layers)
