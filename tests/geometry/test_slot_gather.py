"""Where a token's items lie in every plane: against a look into each plane by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.slot_gather import SlotGather, Table, slot_gather

from .whole_caches import LAYOUTS, CacheSizes, named_layout

pytestmark = pytest.mark.geometry

_ADDRESS = 4096


@st.composite
def caches(draw: st.DrawFn) -> tuple[tuple[Plane, ...], CacheSizes]:
    sizes = CacheSizes(
        layers=draw(st.integers(1, 3)),
        blocks=4 * draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        block_tokens=draw(st.sampled_from([1, 2, 4])),
        channels=draw(st.integers(1, 4)),
        item_bytes=draw(st.sampled_from([1, 2, 4])),
    )
    layout = named_layout(draw(st.sampled_from(sorted(LAYOUTS))))
    return layout.planes(sizes, _ADDRESS, Memory("DRAM"), first_head=0), sizes


def by_plane(gather: SlotGather, memory: np.ndarray, starts: np.ndarray) -> list[bytes]:
    items = memory.reshape(-1, gather.item_bytes)
    taken = items[starts[gather.plane_of_item] + gather.inner]
    return [taken[gather.plane_of_item == n].tobytes() for n in range(len(gather.planes))]


@given(caches(), st.data())
def test_takes_the_token_of_every_plane(
    found: tuple[tuple[Plane, ...], CacheSizes], data: st.DataObject
) -> None:
    planes, sizes = found
    parts = data.draw(st.sampled_from([1, 2, 4]), label="kernel blocks of a block")
    blocks = sizes.blocks // parts
    tables = [Table(n % 2, parts * sizes.block_tokens) for n in range(len(planes))]
    last_blocks = data.draw(st.tuples(*[st.integers(0, blocks - 1)] * 2), label="blocks")
    position = data.draw(st.integers(0, 100), label="position")
    memory = np.random.default_rng(0).integers(0, 256, sizes.total_bytes(), dtype=np.uint8)

    gather = slot_gather(planes, tables, _ADDRESS)
    starts = gather.starts(position, last_blocks)

    assert starts is not None
    inside = position % (parts * sizes.block_tokens)
    for plane, table, taken in zip(
        gather.planes, gather.tables, by_plane(gather, memory, starts), strict=True
    ):
        view = plane.as_array(memory, _ADDRESS)
        block = last_blocks[table.number] * parts + inside // sizes.block_tokens
        assert taken == view[block, :, inside % sizes.block_tokens].tobytes()


@given(caches())
def test_planes_of_as_many_items_follow_one_another(
    found: tuple[tuple[Plane, ...], CacheSizes],
) -> None:
    planes, sizes = found
    wide = [
        replace(p, counts=p.counts._replace(channels=max(1, p.counts.channels - n % 2)))
        for n, p in enumerate(planes)
    ]
    gather = slot_gather(wide, [Table(0, sizes.block_tokens)] * len(wide), _ADDRESS)
    covered = [n for alike in gather.alike for n in range(*alike.planes.indices(len(wide)))]
    assert covered == list(range(len(wide)))
    for alike in gather.alike:
        counts = np.bincount(gather.plane_of_item[alike.items], minlength=len(wide))
        assert len(set(counts[alike.planes].tolist())) == 1
        assert counts.sum() == counts[alike.planes].sum()


def test_a_block_that_a_plane_does_not_have_is_none() -> None:
    sizes = CacheSizes(1, 4, 2, 4, 8, 2)
    planes = named_layout("HND").planes(sizes, _ADDRESS, Memory("DRAM"), first_head=0)
    gather = slot_gather(planes, [Table(0, 4)] * len(planes), _ADDRESS)
    assert gather.starts(0, (3,)) is not None
    assert gather.starts(0, (4,)) is None


def test_what_cannot_be_gathered_is_refused() -> None:
    sizes = CacheSizes(1, 4, 2, 4, 8, 2)
    planes = named_layout("HND").planes(sizes, _ADDRESS, Memory("DRAM"), first_head=0)
    tables = [Table(0, 4)] * len(planes)
    odd = replace(planes[0], address=planes[0].address + 1)
    for wrong in (odd, replace(planes[1], item_bytes=1)):
        with pytest.raises(UnreadableGeometry, match="whole items"):
            slot_gather([planes[0], wrong], tables[:2], _ADDRESS)
    with pytest.raises(UnreadableGeometry, match="make up 6 tokens"):
        slot_gather(planes, [Table(0, 6)] * len(planes), _ADDRESS)
