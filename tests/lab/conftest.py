"""One lab per release for the whole session: importing a release takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.releases.fetch import fetch

from .host import Lab
from .releases import (
    ends_of_generations,
    is_full,
    plays_all,
    selected,
    some_ends_of_generations,
)


@pytest.fixture(scope="session", params=selected())
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The release's workers, ready for cases."""
    fetch([request.param])
    with Lab(request.param) as opened:
        yield opened


def _releases_for(item: pytest.Item) -> list[str]:
    if item.get_closest_marker("some_generations"):
        return some_ends_of_generations()
    return ends_of_generations() if item.get_closest_marker("one_per_generation") else selected()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under pytest-xdist one process takes all of a release's cases.

    Of all releases those alone that end a generation play what is marked
    ``one_per_generation``: seconds a test, and the same code in between. What is a product of
    two such, each played there by itself, is marked ``some_generations``: every third of them.
    """
    left_out = []
    for item in items:
        release = getattr(item, "callspec", None) and item.callspec.params.get("lab")
        if not release:
            continue
        item.add_marker(pytest.mark.xdist_group(release))
        if plays_all() and not is_full() and release not in _releases_for(item):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
