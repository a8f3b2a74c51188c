"""Fingerprints: equal for equal content whatever the layout, unequal for anything else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvpatch.core.errors import EngineFailed
from kvpatch.geometry.plane import Content, Memory
from kvpatch.geometry.state_shares import Part, Rank, SharedState
from kvpatch.tools.verify import probe
from kvpatch.tools.verify.compare import digest_heads, join_ranks
from kvpatch.worker.recurrent_state import StateDivision
from tests.geometry.whole_caches import LAYOUTS, CacheSizes, as_array

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.serving

_LAYER = "layer.0"
_HEADS, _CHANNELS, _ITEM_BYTES, _BLOCKS = 4, 8, 2, 48
_TOKENS = 41
_CONTENTS = (Content.KEY, Content.VALUE)


def _content() -> dict[Content, np.ndarray]:
    """Random bytes [token, head, channel, byte] for keys and values."""
    rng = np.random.default_rng(0)
    shape = (_TOKENS, _HEADS, _CHANNELS, _ITEM_BYTES)
    return {content: rng.integers(0, 256, shape, dtype=np.uint8) for content in _CONTENTS}


def _fingerprints(
    content: dict[Content, np.ndarray],
    layout: str,
    block_tokens: int,
    list_block_tokens: int | None = None,
    heads: slice = slice(0, _HEADS),
    first_token: int = 0,
) -> dict[str, dict[str, str]]:
    """Write the content into a cache as a rank would hold it, and digest it from there."""
    held = range(_HEADS)[heads]
    sizes = CacheSizes(1, _BLOCKS, len(held), block_tokens, _CHANNELS, _ITEM_BYTES)
    memory = np.random.default_rng(9).integers(0, 256, sizes.total_bytes(), dtype=np.uint8)
    tensor = torch.from_numpy(memory)
    planes = LAYOUTS[layout].planes(sizes, tensor.data_ptr(), Memory("DRAM"), first_head=held[0])
    list_tokens = list_block_tokens or block_tokens
    split = list_tokens // block_tokens
    block_ids = [7, 2, 9, 4, 1, 11, 3, 8, 5, 10, 6][: -(-_TOKENS // list_tokens)]
    own_ids = [block * split + part for block in block_ids for part in range(split)]
    for plane in planes:
        view = as_array(plane, memory, tensor.data_ptr())
        for token in range(_TOKENS):
            block, offset = own_ids[token // block_tokens], token % block_tokens
            view[block, :, offset] = content[plane.content][token, heads]
    layer = probe.ProbedLayer(_LAYER, 0, list_tokens, None, tensor, planes)
    digests: dict[str, str] = {}
    for plane in planes:
        rows = probe.read_rows(layer, plane, block_ids, first_token, _TOKENS)
        digests |= digest_heads(plane.content.value, plane.first_head, rows)
    return {_LAYER: digests}


def _reference(content: dict[Content, np.ndarray]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for kind, values in content.items():
        digests |= digest_heads(kind.value, 0, values.reshape(_TOKENS, _HEADS, -1))
    return join_ranks([{_LAYER: digests}])


@pytest.mark.parametrize("block_tokens", [4, 5, 16])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layout_and_block_size_do_not_matter(layout: str, block_tokens: int) -> None:
    content = _content()
    assert join_ranks([_fingerprints(content, layout, block_tokens)]) == _reference(content)


def test_blocks_that_the_kernel_splits_and_ranks_do_not_matter() -> None:
    content = _content()
    split = _fingerprints(content, "CPU_packed", block_tokens=4, list_block_tokens=16)
    halves = [
        _fingerprints(content, "HND", 16, heads=slice(0, 2)),
        _fingerprints(content, "NHD", 4, heads=slice(2, 4)),
    ]
    assert join_ranks([split]) == join_ranks(halves) == _reference(content)


@pytest.mark.parametrize("kind", _CONTENTS)
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (_TOKENS - 1, _HEADS - 1, _CHANNELS - 1, 1)])
def test_one_changed_byte_matters(kind: Content, place: tuple[int, ...]) -> None:
    content = _content()
    content[kind][place] ^= 1
    found = join_ranks([_fingerprints(content, "LBHNC", 16)])
    assert found != _reference(_content())


def test_keys_taken_for_row_major_matter() -> None:
    """Reading the CPU backend's keys in the wrong order must not go unnoticed."""
    content = _content()
    sizes = CacheSizes(1, 1, _HEADS, 48, _CHANNELS, _ITEM_BYTES)
    memory = np.zeros(sizes.total_bytes(), dtype=np.uint8)
    right, wrong = (
        LAYOUTS[name].planes(sizes, 0, Memory("DRAM"))[0] for name in ("CPU_split", "HND")
    )
    as_array(right, memory, 0)[0, :, :_TOKENS] = content[Content.KEY].swapaxes(0, 1)
    read = as_array(wrong, memory, 0)[0, :, :_TOKENS].swapaxes(0, 1).reshape(_TOKENS, _HEADS, -1)
    expected = content[Content.KEY].reshape(_TOKENS, _HEADS, -1)
    assert digest_heads("key", 0, read) != digest_heads("key", 0, expected)


def test_bytes_behind_the_prompt_do_not_matter_and_a_window_does() -> None:
    content = _content()
    whole = _fingerprints(content, "HND", 16)
    windowed = _fingerprints(content, "HND", 16, first_token=20)
    assert whole != windowed
    content[Content.KEY][:20] ^= 1
    assert _fingerprints(content, "HND", 16, first_token=20) == windowed


def test_copies_of_a_head_must_agree() -> None:
    """Those of a state that disagree, as stock leaves them (vLLM #55208), end no run."""
    for piece in ("key/0", "state/0"):
        one, other = ({_LAYER: {piece: digest * 32}} for digest in ("00", "11"))
        assert join_ranks([one, one]) == join_ranks([one])
        if piece == "key/0":
            with pytest.raises(EngineFailed, match="rank 1 holds another copy of key/0"):
                join_ranks([one, other])
        else:
            assert join_ranks([one, other]) not in (join_ranks([one]), join_ranks([other]))


#: x, B and C of 16, 8 and 8 channels of 3 bytes, and 8 heads of 5.
_SHARED = (SharedState(3, (Part(16), Part(8), Part(8))), SharedState(5, (Part(8),)))
_ONE_GROUP = (SharedState(3, (Part(16), *[Part(8, is_copied=True)] * 2)), _SHARED[1])


@pytest.mark.parametrize(
    ("model_heads", "own", "ranks", "first"),
    [(8, 2, 4, 6), (4, 2, 4, 6), (4, 1, 4, 3), (2, 1, 4, 1), (1, 1, 4, 0)],
    ids=["as-the-model", "more-than-the-model", "one-each", "shared-by-two", "one-for-all"],
)
def test_heads_are_numbered_by_their_own_layer(
    model_heads: int, own: int, ranks: int, first: int
) -> None:
    worker = SimpleNamespace(
        rank=ranks - 1,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: model_heads),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        ),
    )
    assert probe.first_head_of(worker, own) == first


def _state_digests(states: tuple[SharedState, ...], rank: Rank) -> dict[str, str]:
    """Of a rank's states, whose bytes are their numbers in the whole model's."""
    shares, first = [], 0
    for state in states:
        for part in state.parts:
            units = np.arange(first, first + part.units * state.unit_bytes, dtype=np.uint8)
            first += units.size
            shares.append(units if part.is_copied else np.split(units, rank.ranks)[rank.number])
    found, digests = np.concatenate(shares), {}
    for number, where in probe.pieces_of(StateDivision(states, reason=""), rank):
        digests.update(digest_heads("state", number, found[None, None, where]))
    return digests


@pytest.mark.parametrize("states", [_SHARED, _ONE_GROUP])
@pytest.mark.parametrize("ranks", [2, 4])
def test_states_do_not_depend_on_ranks(states: tuple[SharedState, ...], ranks: int) -> None:
    whole = join_ranks([{_LAYER: _state_digests(states, Rank(0, 1))}])
    shares = [_state_digests(states, Rank(number, ranks)) for number in range(ranks)]

    assert join_ranks([{_LAYER: share} for share in shares]) == whole
    first, second, *others = shares
    swapped = (
        dict(zip(one, other.values(), strict=True))
        for one, other in ((first, second), (second, first))
    )
    assert join_ranks([{_LAYER: share} for share in (*swapped, *others)]) != whole


def test_states_that_nobody_can_divide_are_one_piece() -> None:
    whole = ((0, slice(None)),)
    assert probe.pieces_of(StateDivision(), Rank(0, 1)) == whole
    assert probe.pieces_of(StateDivision(_SHARED, ""), Rank(0, 16)) == whole


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([{_LAYER: {"key/1": "00" * 32}}], r"heads 0\.\.1, found \[1\]"),
        ([], None),
        ([{}], None),
        ([{_LAYER: {}}], None),
    ],
)
def test_what_is_not_whole_is_no_fingerprint(
    ranks: list[dict[str, dict[str, str]]], says: str | None
) -> None:
    with pytest.raises(EngineFailed, match=says):
        join_ranks(ranks)


def test_too_few_blocks_are_refused() -> None:
    sizes = CacheSizes(1, 2, _HEADS, 4, _CHANNELS, _ITEM_BYTES)
    tensor = torch.zeros(sizes.total_bytes(), dtype=torch.uint8)
    planes = LAYOUTS["HND"].planes(sizes, tensor.data_ptr(), Memory("DRAM"))
    layer = probe.ProbedLayer(_LAYER, 0, 4, None, tensor, planes)
    with pytest.raises(probe.UnreadableGeometry, match="expected blocks for 5 tokens, found 1"):
        probe.read_rows(layer, planes[0], [1], 0, 5)
