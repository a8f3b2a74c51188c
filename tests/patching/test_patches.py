"""What the patches decide about tensors, on small real tensors and bare workers.

The workers here only carry the attributes that an adapter reads; the lab runs
the same patches on every release's real worker.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvpatch.core.errors import RegistrationRefused, UnexpectedCaches, UnreadableGeometry
from kvpatch.core.releases import FACTS
from kvpatch.geometry.cross_layer_blocks import places_of
from kvpatch.kvcached.pools import common_blocks
from kvpatch.load.shown_tensors import (
    arrangement,
    has_cross_layer_blocks,
    is_split_inside,
)
from kvpatch.peer.cross_layer_blocks import cross_layer_blocks_of
from kvpatch.worker.recurrent_state import states_digest, states_in
from kvpatch.worker.registered_caches import is_as_planned, read_layers
from kvpatch.worker.release_worker import BLOCKS_FIRST, KEYS_FIRST, LATENT, PACKED, ReleaseWorker

from .release_workers import reading

BLOCKS, TOKENS, HEADS, CHANNELS, LAYERS = 6, 4, 2, 8, 3
BLOCK = TOKENS * HEADS * CHANNELS


def _read(kv_caches, order):
    return read_layers(reading(order, kv_caches), kv_caches)


def _keys_first(blocks=BLOCKS):
    return torch.zeros(2, blocks, TOKENS, HEADS, CHANNELS)


def _blocks_first():
    return torch.zeros(BLOCKS, 2, TOKENS, HEADS, CHANNELS)


def _split_half(slack_blocks=0):
    """kvcached: keys of all blocks, slack, values of all blocks, seen as [blocks, 2, ...]."""
    half = (BLOCKS + slack_blocks) * BLOCK
    shape = (BLOCKS, 2, TOKENS, HEADS, CHANNELS)
    strides = (BLOCK, half, HEADS * CHANNELS, CHANNELS, 1)
    return torch.zeros(2 * half).as_strided(shape, strides)


def _contiguous():
    """kvcached: a block's bytes of all layers side by side; the view of one layer."""
    pool = torch.zeros(BLOCKS, LAYERS, 2, TOKENS, HEADS, CHANNELS)
    return pool[:, 1]


class TestArrangement:
    @pytest.mark.parametrize(
        ("tensor", "order", "expected", "split"),
        [
            (_blocks_first(), BLOCKS_FIRST, "together", False),
            (_split_half(), BLOCKS_FIRST, "apart", True),
            (_split_half(slack_blocks=5), BLOCKS_FIRST, "apart", True),
            (_contiguous(), BLOCKS_FIRST, "interleaved", False),
            (_contiguous().transpose(0, 1), KEYS_FIRST, "interleaved", False),
            (_keys_first(), KEYS_FIRST, "apart", False),
            (torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CHANNELS), PACKED, "together", False),
            (torch.zeros(BLOCKS, TOKENS, CHANNELS), LATENT, "together", False),
            (torch.zeros(BLOCKS, LAYERS, TOKENS, CHANNELS)[:, 1], LATENT, "interleaved", False),
        ],
    )
    def test_is_read_from_the_strides(self, tensor, order, expected, split):
        (cache,) = _read({"a": tensor}, order).values()

        assert arrangement(cache.planes) == expected
        assert is_split_inside(cache) is split

    @pytest.mark.parametrize(
        ("tensor", "order", "expected", "found"),
        [
            (_contiguous(), BLOCKS_FIRST, BLOCKS_FIRST, True),
            (_contiguous().transpose(0, 1), KEYS_FIRST, KEYS_FIRST, True),
            (_split_half(), BLOCKS_FIRST, BLOCKS_FIRST, False),
            (_keys_first(), KEYS_FIRST, KEYS_FIRST, False),
            # A single layer's: right where the release has both in a block, and nowhere else.
            (_blocks_first(), BLOCKS_FIRST, BLOCKS_FIRST, False),
            (_blocks_first(), BLOCKS_FIRST, PACKED, True),
            (_blocks_first().transpose(0, 1), KEYS_FIRST, KEYS_FIRST, True),
        ],
    )
    def test_rows_are_told_by_what_the_release_expects(self, tensor, order, expected, found):
        assert has_cross_layer_blocks(_read({"a": tensor}, order), {"a": expected}) is found


class TestRows:
    def _pool(self, layers=LAYERS):
        return torch.zeros(BLOCKS, layers, 2, TOKENS, HEADS, CHANNELS)

    def _row(self, tensors, *groups):
        return cross_layer_blocks_of(
            tensors, _read(tensors, BLOCKS_FIRST), places_of(groups or (tensors,))
        )

    @pytest.mark.parametrize(
        ("pool", "place", "words"),
        [
            (1, 1, "2 allocations: expected kvcached's"),
            (0, 2, r"KVCACHED_CONTIGUOUS_LAYOUT=false"),  # a gap
            (0, 0, "expected it in one of"),  # both layers over one place
        ],
    )
    def test_a_second_layer_elsewhere_is_refused(self, pool, place, words):
        pools = self._pool(), self._pool()
        tensors = {"layers.0": pools[0][:, 0], "layers.1": pools[pool][:, place]}

        with pytest.raises(RegistrationRefused, match=words):
            self._row(tensors)

    def test_layers_in_another_order_are_refused(self):
        """A peer knows where a layer lies by its number alone."""
        pool = self._pool(11)
        names = [f"layers.{n}" for n in range(11)]

        assert self._row(dict(zip(names, pool.unbind(1), strict=True))).layers == tuple(names)
        with pytest.raises(RegistrationRefused, match=r"layers\.2.: expected it in one of"):
            self._row(dict(zip(sorted(names), pool.unbind(1), strict=True)))

    def test_layers_of_two_groups_elsewhere_are_refused(self):
        pool = self._pool(2)
        tensors = {f"layers.{n}": pool[:, n // 2] for n in range(4)}

        with pytest.raises(RegistrationRefused, match=r"layers\.0 and layers\.2, of two attention"):
            self._row(tensors, ["layers.0", "layers.1"], ["layers.2", "layers.3"])

    def test_layers_of_two_groups_in_unlike_bytes_are_refused(self):
        pool = self._pool(1)
        other = pool[:, :, :, : TOKENS // 2]

        with pytest.raises(RegistrationRefused, match="one place .* as many bytes there"):
            self._row({"layers.0": pool[:, 0], "layers.1": other[:, 0]}, ["layers.0"], ["layers.1"])

    def _beside_state(self, pool, state):
        attention = {"layers.0": pool[:, 0], "layers.1": pool[:, 1]}
        return states_in(attention | {"state.0": state}, attention, self._row(attention), 1)

    def test_recurrent_state_has_a_place_beside_it(self):
        pool = self._pool(2)
        pages = pool.view(BLOCKS, 2, -1)

        found = self._beside_state(pool, [pages[:, 1, :3], pages[:, 1, 4:20]])["state.0"]

        assert (found.place, found.offsets) == (1, (0, 16))

    def test_pages_of_other_states_are_told_apart(self):
        """From 0.27 on a state's tensor is a page of bytes, whatever is in it."""
        shapes = ((32, 3), (2, 8, 16))
        planned = [
            SimpleNamespace(shapes=shapes, dtypes=(torch.bfloat16, kind))
            for kind in (torch.bfloat16, torch.float32)
        ]

        digests = [states_digest("", {"state.0": 1}, {"state.0": spec}) for spec in planned]

        assert len(set(digests)) == 2
        assert states_digest("", {"state.0": 0}, {"state.0": planned[0]}) not in digests
        assert states_digest("", {}, {}) == ""

    @pytest.mark.parametrize(
        "state",
        [
            lambda pages: [pages[:, 1, 1:3]],  # not from a page's beginning
            lambda pages: [pages[:, 0].as_strided((BLOCKS, 2), (pages.stride(1), 1))],
            lambda pages: [pages[1:, 0]],  # of fewer blocks
            lambda pages: [pages[:, 0].as_strided((BLOCKS, 2), (pages.stride(0), pages.stride(1)))],
            lambda pages: [torch.zeros(BLOCKS, 4)],
        ],
    )
    def test_recurrent_state_elsewhere_is_refused(self, state):
        pool = self._pool(2)

        with pytest.raises(RegistrationRefused, match="no state in a page of"):
            self._beside_state(pool, state(pool.view(BLOCKS, 2, -1)))


class TestBlockCount:
    @pytest.mark.parametrize(
        ("counts", "ratio", "words"), [((7, 9), 1, "a: 7, b: 9"), ((7,), 4, "a multiple of 4")]
    )
    def test_tensors_that_disagree_or_end_in_a_block_are_refused(self, counts, ratio, words):
        names = dict(zip("ab", map(_keys_first, counts), strict=False))
        with pytest.raises(RegistrationRefused, match=words):
            common_blocks(_read(names, KEYS_FIRST), ratio)

    @pytest.mark.parametrize(
        ("counts", "planned", "ratio", "expected"),
        [
            ((6, 6), 6, 1, True),
            ((6, 6), 3, 2, True),
            ((6, 3), 3, 2, True),  # the hybrid allocator hands out both
            ((6, 6), 5, 1, False),
            ((6, 6), None, 1, False),
        ],
    )
    def test_a_plan_that_fits_is_left_alone(self, counts, planned, ratio, expected):
        names = dict(zip("ab", map(_keys_first, counts), strict=True))
        assert is_as_planned(_read(names, KEYS_FIRST), planned, ratio) is expected

    def test_only_this_workers_plan_is_changed(self):
        plan = {"num_blocks": 8, "_logical_num_blocks": 4}
        one, two = (
            SimpleNamespace(**plan, _physical_blocks_per_logical_kv_block=2) for _ in range(2)
        )

        ReleaseWorker(one, FACTS["0.18.0"]).set_blocks(100)

        assert (one.num_blocks, one._logical_num_blocks) == (200, 100)
        assert (two.num_blocks, two._logical_num_blocks) == (8, 4)


class TestBadInput:
    @pytest.mark.parametrize(
        ("tensor", "clause"),
        [
            (_keys_first().expand(2, BLOCKS, TOKENS, HEADS, CHANNELS)[:, :0], "0 blocks"),
            (torch.zeros(2 * BLOCK).as_strided((2, 3, 4, 2, 8), (1, 1, 16, 8, 1)), "overlapping"),
            (torch.zeros(BLOCKS, TOKENS), "is none of"),
            (torch.zeros(3, BLOCKS, TOKENS, HEADS, CHANNELS), "is none of"),
        ],
    )
    def test_is_refused_with_shape_strides_and_layer(self, tensor, clause):
        with pytest.raises(UnreadableGeometry, match=clause) as refused:
            _read({"model.layers.3.attn": tensor}, KEYS_FIRST)

        message = str(refused.value)
        assert "model.layers.3.attn" in message
        assert str(tuple(tensor.shape)) in message and str(tuple(tensor.stride())) in message

    @pytest.mark.parametrize(
        ("layers", "tensors", "words"),
        [
            ("abc", "a", "no KV cache for b, c:"),
            (2, "a", "1 layers .* the model has 2"),  # the release has no names
            ("abc", "", "no layer's KV cache"),
        ],
    )
    def test_a_missing_layer_is_refused(self, layers, tensors, words):
        with pytest.raises(UnexpectedCaches, match=words):
            read_layers(reading(KEYS_FIRST, layers), {name: _keys_first() for name in tensors})
