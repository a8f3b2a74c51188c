"""What tests of reads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .staged_world import World, connected_world


@pytest.fixture
def world() -> Iterator[World]:
    with connected_world() as world:
        yield world
