"""The pages that are generated, each with the function that makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.lab import kvcached_cells, releases_table, table

from . import (
    documents,
    kinds_page,
    metrics_page,
    outcomes,
    refusals_page,
    releases_page,
    tables,
    variables_page,
    vex,
)

#: Tables and lists are made from code and data; the prose between them stays (tables.remade).
GENERATED: dict[Path, Callable[[], str]] = {
    documents.PATCHES_MD: documents.patches_md,
    kinds_page.PAGE: kinds_page.page,
    metrics_page.PAGE: metrics_page.page,
    refusals_page.PAGE: refusals_page.page,
    releases_page.PAGE: releases_page.page,
    variables_page.PAGE: variables_page.page,
    vex.PAGE: vex.page,
    table.PAGE: table.known_page,
    kvcached_cells.PAGE: kvcached_cells.known_page,
    releases_table.PAGE: releases_table.known_page,
    outcomes.PICTURE: outcomes.picture,
}


def write() -> list[Path]:
    """Writes every page that is not what it would be made into now; says which."""
    written = []
    for path, make in GENERATED.items():
        written += _write(path, make())
    for path in tables.pages():
        if path not in GENERATED:
            written += _write(path, tables.with_tables(path))
    return written


def _write(path: Path, text: str) -> list[Path]:
    if path.exists() and path.read_text() == text:
        return []
    path.write_text(text)
    return [path]
