"""One lab per release for the whole session: importing a release takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.releases.fetch import fetch

from .host import Lab
from .releases import selected


@pytest.fixture(scope="session", params=selected())
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The release's workers, ready for cases."""
    fetch([request.param])
    with Lab(request.param) as opened:
        yield opened


@pytest.hookimpl(tryfirst=True)  # before xdist reads the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist one process takes all of a release's cases."""
    for item in items:
        release = getattr(item, "callspec", None) and item.callspec.params.get("lab")
        if release:
            item.add_marker(pytest.mark.xdist_group(release))
