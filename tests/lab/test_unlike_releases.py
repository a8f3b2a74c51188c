"""P of one release, D of another: identical, or refused with a reason, as the table has it.

A run plays neighbours among its releases, both ways round (an upgraded P, an upgraded D): all of
them in full runs, a share of them in the gate, one pair where one release is played alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.peer.other_releases import NULLABLE
from tests.releases.fetch import fetch

from . import releases_table
from .case import Case
from .releases import is_full, newest, selected
from .selection import share
from .side_channel import question
from .unlike_releases import Labs, Pair, all_pairs, cases

pytestmark = pytest.mark.lab


def _pairs() -> list[Pair]:
    if is_full():
        return all_pairs()
    releases = selected()
    if len(releases) == 1:
        at = RELEASES.index(releases[0])
        releases = list(RELEASES[max(0, at - 1) : at + 1])
    part = share()
    steps = [(old, new) for old, new in itertools.pairwise(releases)]
    if part is not None:
        steps = [one for i, one in enumerate(steps) if i % part.parts == part.part]
        if (RELEASES[-2], newest()) not in steps:
            steps.append((RELEASES[-2], newest()))
    return [pair for old, new in steps for pair in (Pair(new, old), Pair(old, new))]


@pytest.fixture(scope="module")
def labs() -> Iterator[Labs]:
    with Labs() as opened:
        yield opened


@pytest.fixture(scope="module", params=_pairs(), ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.param
    fetch(list(found))
    return found


@pytest.mark.parametrize("name", cases())
def test_it_is_identical_or_refused(labs: Labs, pair: Pair, name: str) -> None:
    report = labs.run(pair, releases_table.with_kvpatch(cases()[name]))

    assert report.outcome != "corrupt", report
    if releases_table.is_read(pair):
        assert report.outcome in ("identical", "refused"), report
    assert report.listens or not releases_table.can_ask(pair), report
    row = releases_table.known().get(pair)
    if row is not None:
        assert releases_table.letter(report) == row.kvpatch[list(cases()).index(name)], report


def test_where_no_other_release_is_accepted_p_is_refused_and_goes_on(
    labs: Labs, pair: Pair
) -> None:
    """But a P whose answer has less than D's, or a null more: it may be like D, behind a proxy."""
    if not releases_table.is_read(pair):
        pytest.skip("there is no hash")

    report = labs.run(pair, _first_case().patched(prefill=False))

    assert report.outcome in ("refused", "failed"), report
    looks_older = FACTS[pair.prefill].answer - NULLABLE <= FACTS[pair.decode].answer
    assert report.listens == (not looks_older or _is_asked_alike(pair)), report
    if report.listens:
        report.must_be("refused")


def test_stock_refuses_by_the_hash_or_ends_ps_listener(labs: Labs, pair: Pair) -> None:
    """What is mended here, and that the lab sees it; the question comes before the hash."""
    if not releases_table.is_read(pair):
        pytest.skip("there is no hash")

    report = labs.run(pair, _first_case().stock())

    assert report.outcome in ("refused", "failed"), report  # <= 0.21 D's engine ends
    assert report.listens == _is_asked_alike(pair), report
    if _is_asked_alike(pair):
        assert "NIXL compatibility hash mismatch" in report.detail


def _is_asked_alike(pair: Pair) -> bool:
    return len({question(release, 0) for release in pair}) == 1


def _first_case() -> Case:
    return next(iter(cases().values()))
