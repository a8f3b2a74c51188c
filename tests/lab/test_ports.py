"""Labs beside one another have no port in common."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from .host import Ports

pytestmark = pytest.mark.patching


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _ranges(*ports: Ports) -> set[int]:
    return {one.take(1) // Ports._COUNT for one in ports}


def test_each_lab_has_a_range_of_its_own() -> None:
    assert len(_ranges(Ports(), Ports(), Ports())) == 3


def test_a_range_is_free_again_when_its_lab_has_ended() -> None:
    first = Ports()
    taken = _ranges(first)
    del first

    assert _ranges(Ports()) == taken


def test_when_all_ranges_are_taken_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ports, "_RANGES", 0)

    with pytest.raises(OSError, match="labs have all ports"):
        Ports().take(1)
