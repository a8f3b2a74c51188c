"""Every clock of the code's stands in the documentation's table, and no check has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .tables import ROOT

_PAGE = ROOT / "docs" / "explanation" / "stale_blocks.md"
_CONSTANT = re.compile(r"^(\w*SECONDS) = ([\d.e-]+)$", re.MULTILINE)
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 1e6

CLOCKS = {
    f"{path.stem}.{name}": float(value)
    for path in Path(ROOT, "kvpatch").rglob("*.py")
    if path.relative_to(ROOT).parts[1] not in ("core", "tools")  # not of a load
    for name, value in _CONSTANT.findall(path.read_text())
    if _LEAST_SECONDS <= float(value) <= _MOST_SECONDS
}


@pytest.mark.parametrize("name", sorted(CLOCKS))
def test_a_clock_is_documented(name: str) -> None:
    (table,) = re.findall(r"^## Clocks\n\n((?:\|.*\n)+)", _PAGE.read_text(), re.MULTILINE)
    assert re.search(rf"\b{CLOCKS[name]:g} s\b", table), name


def test_no_check_has_a_clock_that_fails_a_load() -> None:
    found = {
        name
        for name in CLOCKS
        if name.partition(".")[0] in ("hold_check", "digest_check", "tables")
    }
    assert found == {"hold_check._ASK_AGAIN_SECONDS"}
