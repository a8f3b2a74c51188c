"""Cross-layer blocks that groups divide in ways of their own, and states in them, as in vLLM."""

from __future__ import annotations

import pytest
import torch

from kvpatch.core.errors import PeerRefused, UnreadableGeometry
from kvpatch.geometry.cross_layer_blocks import LAYER_AXES, read_cross_layer_blocks
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.peer.agent_metadata import (
    CrossLayerForm,
    form_in,
    packed_digest,
    places_digest,
    without_form,
)
from kvpatch.worker.registered_caches import tensor_facts
from kvpatch.worker.release_worker import PACKED
from kvpatch.worker.vllm_bugs import misread_states

from .release_workers import worker_of

_BLOCKS, _TOKENS, _ROW = 6, 4, 256  # bfloat16 items


def _view(
    pool: torch.Tensor, start: int, heads: int, channels: int, row: int = _ROW
) -> torch.Tensor:
    """[block, head, token, packed] in rows, tokens before heads."""
    size = (_BLOCKS, heads, _TOKENS, 2 * channels)
    strides = (row, 2 * channels, heads * 2 * channels, 1)
    return torch.as_strided(pool, size, strides, start)


def _planes(name: str, cache: torch.Tensor):
    return read_planes(name, tensor_facts(cache), PACKED)


def _groups(second_start: int = 128, **changes: int):
    """Two layers of 128 items fill a row; one of 64 leaves the rest of it over."""
    pool = torch.zeros(_BLOCKS * _ROW, dtype=torch.bfloat16)
    wide = {"a": _view(pool, 0, 2, 8), "c": _view(pool, second_start, 2, 8)}
    narrow = {"b": _view(pool, changes.get("narrow", 0), 1, 8, changes.get("row", _ROW))}
    found = [
        {name: _planes(name, cache) for name, cache in group.items()} for group in (narrow, wide)
    ]
    return pool, found


@pytest.mark.parametrize(
    "changes",
    [
        {"second_start": 120},  # overlapping
        {"narrow": 16},  # behind the row's beginning
        {"row": _ROW - 16},  # of other rows
    ],
)
def test_layers_elsewhere_are_refused(changes: dict[str, int]) -> None:
    _, groups = _groups(**changes)

    with pytest.raises(UnreadableGeometry, match="expected"):
        read_cross_layer_blocks(groups)


def test_another_order_is_refused() -> None:
    pool, (narrow, wide) = _groups()

    assert read_cross_layer_blocks([narrow, wide]).address == pool.data_ptr()
    with pytest.raises(UnreadableGeometry, match="expected"):
        read_cross_layer_blocks([narrow, dict(reversed(wide.items()))])


def test_what_is_told_of_packed_groups_tells_them_from_all_others() -> None:
    groups = (("a", "c"), ("b",))

    told = {
        packed_digest(groups),
        packed_digest((("c", "a"), ("b",))),
        packed_digest((("a", "c", "b"),)),
        places_digest((("a", "b"), ("c",))),
        places_digest((("a", "c"), ("b",))),
    }

    assert len(told) == 5


# --- states in cross-layer blocks ------------------------------------------------

_PAGE = 512


class MambaSpec:
    page_size_bytes = _PAGE


class MLAAttentionSpec:
    pass


def _caches(
    *order: str, dense: bool = True, row_bytes: int = 2 * _PAGE, heads: int = 4
) -> dict[str, torch.Tensor]:
    """Attention and a state at the beginning of each row, by the layers' names."""
    pool = torch.zeros(_BLOCKS * row_bytes, dtype=torch.int8)
    strides = (row_bytes, 128, 32, 1) if dense else (row_bytes, 32, 32 * heads, 1)
    views = {
        "attention": torch.as_strided(pool, (_BLOCKS, heads, 4, 32), strides),
        "state": torch.as_strided(pool, (_BLOCKS, 1, 1, 400), (row_bytes, 400, 400, 1)),
    }
    return {name: views[name.split(".")[-1]] for name in order}


def _is_misread(
    caches: dict[str, torch.Tensor],
    layout: str = "BLHNC",
    release: str = "0.29.0",
    *,
    is_linear: bool = False,
    use_mla: bool = False,
) -> bool:
    states = {name for name in caches if name.endswith("state")}
    attention = MLAAttentionSpec() if use_mla else object()
    worker = worker_of(
        release,
        use_mla=use_mla,
        kv_cache_layout=layout,
        _is_csa_linear=is_linear,
        _layer_specs={name: MambaSpec() if name in states else attention for name in caches},
    )
    return misread_states(worker, caches, caches.keys() - states)


def test_a_state_behind_attention_in_one_piece_is_read_by_its_region() -> None:
    assert not _is_misread(_caches("0.attention", "1.state"))


@pytest.mark.parametrize(
    ("order", "dense"),
    [
        (("0.state", "1.attention"), True),
        (("1.attention", "0.state"), True),  # registered first from 0.30 on, by its number
        (("1.state", "0.attention"), True),  # and in 0.29, by the plan
        (("0.attention", "1.state"), False),  # BLNHC: attention is the whole row
        (("0.state",), True),
    ],
)
def test_a_state_whose_region_has_another_stride_is_misread(
    order: tuple[str, ...], dense: bool
) -> None:
    assert _is_misread(_caches(*order, dense=dense))


@pytest.mark.parametrize(("release", "misreads"), [("0.29.0", True), ("0.30.0", False)])
def test_0_29_takes_a_single_heads_page_in_blnhc_for_the_whole_row(
    release: str, misreads: bool
) -> None:
    caches = _caches("0.attention", "1.state", dense=False, heads=1)

    assert _is_misread(caches, "BLNHC", release) is misreads


@pytest.mark.parametrize(("release", "misreads"), [("0.29.0", True), ("0.30.0", False)])
def test_0_29_has_rows_of_latents_in_one_piece(release: str, misreads: bool) -> None:
    caches = _caches("0.attention", "1.state", heads=1)

    assert not _is_misread(caches, release=release)
    assert _is_misread(caches, release=release, use_mla=True) is misreads
    first = _caches("0.state", "1.attention", heads=1)
    assert _is_misread(first, release=release, use_mla=True) is misreads
    assert _is_misread(first, release=release)


def test_pages_one_behind_the_other_are_not_misread() -> None:
    assert not _is_misread(_caches("0.state", row_bytes=_PAGE))
    assert not _is_misread(_caches("0.state"), "LBHNC")
    assert not _is_misread(_caches("0.state"), is_linear=True)


# --- what a handshake says of cross-layer blocks -----------------------------------------------


_PLACES = (("layers.0", "layers.1"), ("layers.2", "layers.3"))


@pytest.mark.parametrize("axes", LAYER_AXES)
@pytest.mark.parametrize("places", ["", places_digest(_PLACES)])
def test_is_read_as_it_was_written(axes, places):
    form = CrossLayerForm(16, 2, axes, places)

    assert form_in(None, f"FLASH_ATTN {form}") == form
    assert without_form(f"FLASH_ATTN {form}") == "FLASH_ATTN"


def test_layers_that_are_alone_are_not_told():
    assert places_digest((("layers.0",), ("layers.1",))) == ""
    assert str(CrossLayerForm(16, 1, LAYER_AXES[0])).count(":") == 2


def test_other_layers_side_by_side_are_told_apart():
    swapped = (("layers.1", "layers.0"), _PLACES[1])
    other = (("layers.0", "layers.2"), ("layers.1", "layers.3"))

    assert places_digest(swapped) == places_digest(_PLACES)  # one place, in whichever order
    assert places_digest(other) != places_digest(_PLACES)
    assert places_digest(_PLACES[::-1]) != places_digest(_PLACES)


def test_unknown_axes_are_refused():
    with pytest.raises(PeerRefused, match="expected one of"):
        form_in("kvpatch_rows:1x16:NNNN")
