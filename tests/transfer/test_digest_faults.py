"""What a load can get wrong, and what its digest says of it: each place that differs, no other.

Each fault is played between engines of unlike layouts, blocks and ranks. The controls: bytes that
are nobody's business raise no alarm, and a digest without weights misses what weights are for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.checks.digests import Comparison, Digests, UInt64Array, Weights, compare
from kvpatch.geometry.plane import Content
from tests.geometry.slow_digests import of_all_ranks, proves

from .digest_world import SEED, Engine, Rank, Request

LAYERS, HEADS, TOKENS, CHANNELS, BLOCK, RANGE = 4, 4, 90, 16, 16, 32
PREFILL = [Rank("HND", 32, range(2), seed=3), Rank("HND", 32, range(2, 4), seed=4)]
DECODE = [Rank("NHD", BLOCK, range(HEADS), seed=5)]
MIDDLE, THIRD = 2, slice(2 * BLOCK, 3 * BLOCK)

Fault = Callable[[Request], None]
#: (layer, content, head, range)
Cells = set[tuple[int, int, int, int]]


def values(dtype: torch.dtype, seed: int = 0) -> Request:
    """What a model could have computed."""
    shape = (LAYERS, 2, HEADS, TOKENS, CHANNELS)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return numbers.view(torch.uint8).reshape(*shape, dtype.itemsize).numpy()


def stale(request: Request, tokens: slice = slice(None)) -> None:
    request[:, :, :, tokens] = values(torch.bfloat16, seed=9)[:, :, :, tokens]


def zeroed(request: Request) -> None:
    request[:, :, :, THIRD] = 0


def blocks_swapped(request: Request) -> None:
    request[:, :, :, [*range(32)]] = request[:, :, :, [*range(16, 32), *range(16)]]


def heads_swapped(request: Request) -> None:
    request[MIDDLE] = request[MIDDLE][:, [1, 0, 2, 3]]


def channels_turned(request: Request) -> None:
    request[MIDDLE, 0] = np.roll(request[MIDDLE, 0], 2, axis=2)


def two_that_cancel(request: Request) -> None:
    """One more here and one less there: the same total, in one channel of two tokens."""
    words = request.view(np.int16)[..., 0]
    words[1, 0, 2, 7, 5] += 1
    words[1, 0, 2, 9, 5] -= 1


def four_that_cancel(request: Request) -> None:
    """In two tokens and two channels: the same totals of each token and of each channel."""
    words = request.view(np.int16)[..., 0]
    for token, channel in product((7, 9), (4, 6)):
        words[1, 0, 2, token, channel] += 1 if (token == 7) == (channel == 4) else -1


#: Those that a digest without weights sees, and those that it cannot see.
SEEN = (stale, partial(stale, tokens=THIRD), zeroed, heads_swapped)
PERMUTATIONS = (blocks_swapped, channels_turned, two_that_cancel, four_that_cancel)


def digests_of(request: Request, ranks: list[Rank], weights: Weights | None = None) -> Digests:
    return of_all_ranks([Engine(request, rank).digests(RANGE, weights=weights) for rank in ranks])


def differing(request: Request, other: Request) -> Cells:
    """Where bytes differ, by looking at them."""
    layers, contents, heads, tokens = np.nonzero((request != other).any(axis=(4, 5)))
    columns = (column.tolist() for column in (layers, contents, heads, tokens // RANGE))
    return set(zip(*columns, strict=True))


def named(found: Comparison) -> Cells:
    """Where a comparison says that they do."""
    return {
        (int(place.layer[6:]), int(place.content is Content.VALUE), head, first // RANGE)
        for place in found.wrong
        for head in place.heads
        for first in range(place.first_token // RANGE * RANGE, place.end_token, RANGE)
    }


class _WithoutWeights(Weights):
    """All ones: a plain sum."""

    def _drawn(self, what: str, first: int, end: int) -> UInt64Array:
        return np.ones(end - first, dtype=np.uint64)


@pytest.mark.parametrize("fault", (*SEEN, *PERMUTATIONS))
def test_a_fault_is_noticed_where_it_is_and_nowhere_else(fault: Fault) -> None:
    sent, arrived = values(torch.bfloat16), values(torch.bfloat16)
    fault(arrived)
    wanted = differing(sent, arrived)
    assert wanted

    found = compare(digests_of(sent, PREFILL), digests_of(arrived, DECODE))

    assert named(found) == wanted
    assert (found.checked, found.unchecked) == (LAYERS * 2 * HEADS * 3, ())
    plain = _WithoutWeights(SEED)
    is_missed = proves(digests_of(sent, PREFILL, plain), digests_of(arrived, DECODE, plain))
    assert is_missed == (fault in PERMUTATIONS), "negative control"


@pytest.mark.parametrize("seed", range(20))
def test_signs_of_single_floats_are_the_hardest(seed: int) -> None:
    """Every difference is 2**31 in each word: what the bound of the docstring is made of."""
    sent, arrived = values(torch.float32), values(torch.float32)
    chosen = np.random.default_rng(seed).integers(0, 2, arrived.shape[:-1], dtype=np.uint8)
    arrived[..., 3] ^= chosen << 7

    found = compare(digests_of(sent, PREFILL), digests_of(arrived, DECODE))

    assert named(found) == differing(sent, arrived)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            *(st.integers(0, size - 1) for size in (LAYERS, 2, HEADS, TOKENS, CHANNELS, 2)),
            st.integers(1, 255),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_wrong_bytes_are_noticed(wrong: list[tuple[int, ...]]) -> None:
    sent = values(torch.bfloat16)
    arrived = sent.copy()
    for *place, bits in wrong:
        arrived[tuple(place)] ^= bits

    found = compare(digests_of(sent, PREFILL), digests_of(arrived, DECODE))

    assert named(found) == differing(sent, arrived)


def test_bytes_of_others_raise_no_alarm() -> None:
    """Blocks of other requests, and what lies behind the last token."""
    sent = values(torch.bfloat16)
    theirs = digests_of(sent, PREFILL)
    engine = Engine(sent, DECODE[0])
    for plane in engine.planes:
        view = engine.view(plane)
        others = np.setdiff1d(np.arange(plane.counts.blocks), engine.blocks.block_ids)
        assert others.size
        view[others] ^= 0x55
        view[engine.blocks.block_ids[-1], :, TOKENS % BLOCK :] ^= 0x55

    assert proves(theirs, engine.digests(RANGE))
