"""Caches in tiles (AMX) are digested, zeroed and looked at as the rows that they hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpatch.checks.cache_digests import memories_of
from kvpatch.checks.digests import ranges_of
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.segments import BlockList
from tests.geometry.slow_digests import as_numbers, proves
from tests.geometry.test_tiles import cache_of, planes_at, rows_of

from .digest_world import Engine, Rank, digested, request_of
from .test_cache_digests import assert_device_sums, expected_of

pytestmark = pytest.mark.patching

_IDS = np.array([4, 1, 5])


def held(order: KeyOrder, rows: npt.NDArray[np.uint16]) -> tuple[torch.Tensor, tuple[Plane, ...]]:
    memory = torch.from_numpy(np.frombuffer(cache_of(order, rows), np.uint8).copy())
    return memory, planes_at(order, rows.shape[3], memory.data_ptr())


@pytest.mark.parametrize("block_tokens", [32, 64])
@pytest.mark.parametrize("range_tokens", [1, 16, 40])
def test_a_request_has_one_digest(block_tokens: int, range_tokens: int) -> None:
    """In tiles as in rows."""
    tokens = 2 * block_tokens + 7
    request = request_of(layers=1, heads=2, tokens=tokens, channels=32, item_bytes=2)
    rows = rows_of(1, block_tokens).copy()
    blocks = BlockList(_IDS, block_tokens)
    for token in range(tokens):
        (block,), (offset,) = blocks.locate(np.array([token]))
        wanted = np.ascontiguousarray(request[0, :, :, token]).view(np.uint16)[..., 0]
        rows[:, block, :, offset] = wanted
    memory, planes = held(KeyOrder.TILED, rows)
    memories = memories_of({"layer.0": memory})

    found = digested(memories, planes, blocks, range_tokens, (0, tokens))

    expected = expected_of(request, ranges_of(0, tokens, range_tokens))
    assert as_numbers(found) == as_numbers(expected)
    assert proves(expected, Engine(request, Rank(heads=range(2))).digests(range_tokens))
    spoilt = planes_at(KeyOrder.COLUMN_MAJOR, block_tokens, memory.data_ptr())
    assert not proves(expected, digested(memories, spoilt, blocks, range_tokens, (0, tokens)))


def test_a_device_sums_tiles_as_the_host_does() -> None:
    memory, planes = held(KeyOrder.TILED, rows_of(1, 64))
    assert_device_sums(memory, planes, BlockList(_IDS, 64))
