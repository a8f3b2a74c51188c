"""Digests as bytes, the tokens that they cover, and heads of planes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.checks.digests import (
    Stated,
    extents_of,
    joined,
    range_tokens_of,
    ranges_of,
    read,
    within,
    written,
)
from kvpatch.core.errors import DigestsRefused
from kvpatch.geometry.plane import Content

from .slow_digests import as_numbers, digests_of

pytestmark = pytest.mark.geometry


def stated(layers: int = 2, first_head: int = 3) -> Stated:
    ranges = ((0, 16), (16, 32), (32, 40))
    cells = {
        (f"layer {layer}", content): {
            head: [layer, head, 2**64 - 1 - head] for head in range(first_head, first_head + 2)
        }
        for layer in range(layers)
        for content in (Content.KEY, Content.VALUE)
    }
    return Stated(16, digests_of(cells, ranges, b"seed"), is_sample=bool(layers % 2))


def test_what_is_written_is_read():
    parts = [stated(), stated(1, 0)]

    found = read(written(parts), b"seed")

    for one, expected in zip(found, parts, strict=True):
        assert one.range_tokens == expected.range_tokens
        assert one.is_sample == expected.is_sample
        assert one.digests.ranges == expected.digests.ranges
        assert one.digests.seed == b"seed"
        assert as_numbers(one.digests) == as_numbers(expected.digests)


@pytest.mark.parametrize("cut", [0, 3, 8, 40, -8, -1])
def test_other_bytes_are_no_digests(cut: int):
    with pytest.raises(DigestsRefused):
        read(written([stated()])[:cut], b"seed")


def form(**changed: object) -> dict[str, object]:
    """What P says before its sums, of one part with one head and two ranges."""
    cells = [("layer", Content.KEY.value, [0])]
    part = {"range": 16, "sample": False, "ranges": [[0, 16], [16, 32]], "cells": cells}
    return {"form": 1, "parts": [{**part, **changed}]}


@pytest.mark.parametrize(
    "told",
    [
        {"form": 2, "parts": []},
        {"form": 1},
        [],
        form(range=0),
        form(cells=[["a", "no", [0]]]),
        form(ranges=[[0], [16, 32]]),
        # Else a peer would have us digest the same tokens over and over.
        form(ranges=[[16, 32], [0, 16]]),
        form(ranges=[[0, 16], [0, 16]]),
        form(ranges=[[0, 32], [16, 48]]),
        form(ranges=[[16, 16], [16, 32]]),
        form(ranges=[[-16, 0], [0, 16]]),
        form(ranges=[[0, 16], [16, float("inf")]]),
    ],
)
def test_what_is_told_must_be_of_its_form(told):
    def read_after(told: object) -> object:
        head = json.dumps(told).encode()
        return read(len(head).to_bytes(8, "little") + head + bytes(16), b"seed")

    assert read_after(form())
    with pytest.raises(DigestsRefused):
        read_after(told)


def test_a_head_that_goes_too_deep_is_refused():
    head = b"[" * 200_000
    with pytest.raises(DigestsRefused):
        read(len(head).to_bytes(8, "little") + head, b"seed")


def test_some_ranges_of_digests():
    assert within(stated(), (1, 40)) == ((16, 32), (32, 40))
    assert within(stated(), (0, 39)) == ((0, 16), (16, 32))


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 20_000))
def test_ranges_have_room(tokens: int, cells: int, most_cells: int):
    size = range_tokens_of(tokens, cells, most_cells)
    assert size % 16 == 0
    assert cells * -(-tokens // size) <= most_cells or size >= tokens


@given(st.integers(0, 500), st.integers(0, 5000), st.sampled_from([16, 32, 128]), st.binary())
def test_a_sample_is_whole_ranges_of_all_parts(first: int, end: int, size: int, seed: bytes):
    whole = extents_of(first, end, size, seed, is_sample=False)
    assert whole == (((first, end),) if first < end else ())

    found = extents_of(0, end, size, seed, is_sample=True)

    assert found == extents_of(0, end, size, seed, is_sample=True)
    covered = 0
    before = -1
    for start, stop in found:
        assert before < start < stop <= end
        assert start % size == 0 and (stop % size == 0 or stop == end)
        before, covered = stop, covered + stop - start
    if end:
        ranges = -(-end // size)
        assert -(-covered // size) >= min(ranges, 8)
        assert covered <= end / 8 + 8 * size
        assert all(
            len(ranges_of(start, stop, size)) == -(-(stop - start) // size) for start, stop in found
        )
    behind = extents_of(first, end, size, seed, is_sample=True)
    assert {token for run in behind for token in range(*run)} <= {
        token for run in found for token in range(*run) if token >= first
    }


def test_runs_that_touch_are_one():
    assert joined([(0, 16), (16, 20), (32, 48)]) == ((0, 20), (32, 48))
    assert joined([]) == ()
