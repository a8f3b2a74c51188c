"""One lab per release for the whole session: importing a release takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.releases.fetch import fetch

from .covered import covered
from .host import Lab
from .releases import (
    ends_of_generations,
    is_full,
    is_listed,
    newest,
    selected,
    some_ends_of_generations,
)
from .selection import Share, name_without, share


@pytest.fixture(scope="session", params=selected())
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The release's workers, ready for cases."""
    fetch([request.param])
    with Lab(request.param) as opened:
        yield opened


def _releases_for(item: pytest.Item) -> list[str]:
    """The releases on which a test is played where none are asked for by name."""
    if item.get_closest_marker("every_release"):
        return selected()
    if item.get_closest_marker("some_generations"):
        return some_ends_of_generations()
    return ends_of_generations() if item.get_closest_marker("one_per_generation") else selected()


def _is_played(item: pytest.Item, release: str, part: Share | None) -> bool:
    if is_full():
        return True
    releases = selected() if is_listed() else _releases_for(item)
    if release not in releases:
        return False
    if part is None or release == newest() or item.get_closest_marker("every_release"):
        return True
    return part.has(name_without(release, item.nodeid), releases, release)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what a run does not play.

    Where all releases are played, those alone that end a generation play what is marked
    ``one_per_generation``: seconds a test, and the same code in between. What is a product of
    two such, each played there by itself, is marked ``some_generations``: every third of them.
    Of what is left a share is played where one is asked for (``selection.py``).
    """
    part = share()
    left_out = []
    for item in items:
        release = getattr(item, "callspec", None) and item.callspec.params.get("lab")
        if not release:
            continue
        if not _is_played(item, release, part):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the run covered, where it was a share."""
    if share() is None:
        return
    terminalreporter.section("what of the lab was played")
    terminalreporter.line(covered())
