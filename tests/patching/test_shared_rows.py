"""Rows of blocks in which layers of unlike kinds overlay one another: what the release copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import FACTS
from kvpatch.peer.decision import Stock, decide
from kvpatch.peer.unread_caches import UnreadCache
from kvpatch.worker.shared_rows import Holder, Page, Region, SharedRows, regions_of

from .test_remote_geometry import stating

_SUMMARY, _HEADS, _RING = 20, 100, 10
_OVERLAY = "copies a rank's share of one over another"


def _rows(attention_layers: int) -> SharedRows:
    """A group's summaries and then its heads, one's delta nets as long as heads, and a ring's."""
    starts = [_SUMMARY * n for n in range(attention_layers)]
    end = _SUMMARY * attention_layers
    of_heads = [end + _HEADS * n for n in range(attention_layers)]
    pages = (
        *(Page("summary", 0, Region(start, _SUMMARY), Holder.WHOLE) for start in starts),
        *(Page("heads", 0, Region(start, _HEADS), Holder.HEADS) for start in of_heads),
        *(Page("net", 1, Region(_HEADS * n, 90), Holder.STATE) for n in range(attention_layers)),
        Page("ring", 2, Region(0, _RING), Holder.RING),
    )
    sizes = dict.fromkeys((_HEADS * n for n in range(attention_layers)), _HEADS)
    sizes |= dict.fromkeys(of_heads, _HEADS) | dict.fromkeys(starts, _SUMMARY)
    regions = regions_of(list(sizes), list(sizes.values()))
    whole = tuple(region.offset in starts for region in regions)
    return SharedRows(regions, whole, pages, heads=2)


def _decided(rows: SharedRows, ranks: tuple[int, int], regions: tuple[Region, ...] = ()) -> str:
    """Why a P of other ranks is refused; empty where it is left to the release."""
    local = UnreadCache(64, ranks[1], "BLHNC", "", rows=rows)
    remote = stating(
        ranks[0],
        64,
        "BLHNC",
        addresses=tuple(region.offset for region in regions),
        block_bytes=tuple(region.size_bytes for region in regions),
    )
    found = decide(local, remote, FACTS["0.33.0"])
    assert isinstance(found, PeerRefused | Stock)
    return found.reason if isinstance(found, PeerRefused) else ""


@pytest.mark.parametrize(
    "other",
    [
        lambda found: found[1:],
        lambda found: (found[0], *(one._replace(offset=one.offset + 8) for one in found[1:])),
        lambda found: (*found[:-1], found[-1]._replace(size_bytes=8)),
    ],
    ids=["fewer", "elsewhere", "shorter"],
)
def test_unlike_rows_of_shared_heads_are_refused(
    other: Callable[[tuple[Region, ...]], tuple[Region, ...]],
) -> None:
    rows = _rows(2)

    assert _OVERLAY in _decided(rows, (2, 4), other(rows.regions))


def test_rings_in_the_region_of_heads() -> None:
    heads = Page("heads", 0, Region(0, _HEADS), Holder.HEADS)
    short, long = (Page("ring", 1, Region(0, size), Holder.RING) for size in (_RING, 60))
    rows = SharedRows((heads.region,), (False,), (heads, short), heads=4)

    assert "reads a share where P has fewer ranks" in _decided(rows, (1, 2))
    assert _decided(rows, (2, 1)) == ""
    assert "reads a share where P has more ranks" in _decided(
        replace(rows, pages=(heads, long)), (2, 1)
    )


def test_rings_without_states_are_read_by_all_regions() -> None:
    rows = _rows(2)
    pages = tuple(page for page in rows.pages if page.holder is not Holder.STATE)
    long = (*pages, Page("long", 2, Region(0, 21), Holder.RING))

    assert replace(rows, pages=long).copied_short() is None


@pytest.mark.parametrize(("size", "told"), [(20, ""), (21, "layer long has 21 bytes in a block")])
def test_from_0_30_on_by_regions_of_their_group_and_those_of_several(size: int, told: str) -> None:
    """Without states a region is read for the blocks of the group whose layers begin there."""
    rows = _rows(2)
    pages = tuple(page for page in rows.pages if page.holder is not Holder.STATE)
    long = (*pages, Page("long", 2, Region(0, size), Holder.RING))
    groups = tuple(-1 if region.offset == 0 else 0 for region in rows.regions)

    assert told in _decided(replace(rows, pages=long, groups=groups), (1, 1), rows.regions)


@pytest.mark.parametrize(("row_bytes", "told"), [(1000, "P's at other places"), (0, "")])
def test_rows_of_as_many_ranks(row_bytes: int, told: str) -> None:
    """As two plans of one model are, where types or drafted layers differ."""
    rows = replace(_rows(2), row_bytes=row_bytes)
    first, *others = rows.regions
    elsewhere = (first, *(one._replace(offset=one.offset + 8) for one in others))

    assert _decided(rows, (2, 2), rows.regions) == ""
    assert told in _decided(rows, (2, 2), elsewhere)
    assert bool(told) == bool(_decided(rows, (2, 2), elsewhere))
