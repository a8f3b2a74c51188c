"""What tests of reads share."""

from __future__ import annotations

import pytest

from .staged_world import World, make_world


@pytest.fixture
def world() -> World:
    return make_world()
