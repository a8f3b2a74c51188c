"""What tests of reads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpatch.transfer import kernel_thread

from .staged_world import World, connected_world


@pytest.fixture
def world() -> Iterator[World]:
    with connected_world() as world:
        yield world


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has tried no kernel so far, and waits for those that it tries."""
    monkeypatch.setattr(kernel_thread, "_tried", {})
    monkeypatch.setattr(kernel_thread, "patience_seconds", 60.0)
