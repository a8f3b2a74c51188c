"""The tables of docs/evidence/kvcached.md are those of the outcomes that were kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import kvcached_cells

pytestmark = pytest.mark.contract


def test_the_page_has_the_tables_of_its_data() -> None:
    known = kvcached_cells.read_cells()
    page = kvcached_cells.PAGE.read_text()

    assert kvcached_cells.with_tables(page, known) == page
    every = {" ".join(cell) for cell in kvcached_cells.cells()}
    assert known and all(set(found) == every for found in known.values())


def test_a_cell_that_is_changed_shows() -> None:
    known = kvcached_cells.read_cells()
    page = kvcached_cells.PAGE.read_text()
    release = next(iter(known))
    cell = next(iter(known[release]))
    changed = known | {release: known[release] | {cell: ["works", "corrupts"]}}

    assert kvcached_cells.with_tables(page, changed) != page


def test_results_are_kept_as_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, runs = kvcached_cells.read_cells(), kvcached_cells.known_runs()
    texts = kvcached_cells._CELLS.read_text(), kvcached_cells.PAGE.read_text()
    for name, text in zip(("_CELLS", "PAGE"), texts, strict=True):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(kvcached_cells, name, tmp_path / name)

    kvcached_cells.keep(known, runs)

    assert texts == (kvcached_cells._CELLS.read_text(), kvcached_cells.PAGE.read_text())
