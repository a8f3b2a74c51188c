"""What tests of this folder share."""

from __future__ import annotations

import pytest

from kvpatch.core.releases import RELEASES
from tests.releases.fetch import fetch


@pytest.fixture(scope="session")
def trees() -> None:
    """Has the source of every release in the cache."""
    fetch(RELEASES)
