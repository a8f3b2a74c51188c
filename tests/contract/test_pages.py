"""The pages that people read: what is generated is fresh, and what is quoted exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache as kept
from pathlib import Path

import pytest

from kvpatch.core.releases import RELEASES
from tests.lab import kvcached_cells, table
from tests.releases import cache

from . import documents, facts_table, messages, pages, tables, variables_page

pytestmark = pytest.mark.contract

_LOG_LINES = [
    tables.ROOT / "docs" / "reference" / name for name in ("log_lines.md", "log_lines_of_vllm.md")
]
_CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
_CODE = re.compile(r"`([^`]+)`")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
#: Between two literals that follow one another.
_SEAM = re.compile(r"\"\s*\n\s*f?\"")
_PATH = re.compile(r"\b(?:kvpatch|tests|experiments|docs)/[\w./-]*\w")
_MOST_LINES_OF_README = 150


def _rows_of(heading: str) -> Iterator[tuple[str, list[str]]]:
    """(a quoted line, the row's cells) below the heading that ends with this word."""
    current = ""
    for text in "".join(page.read_text() for page in _LOG_LINES).splitlines():
        if text.startswith("## "):
            current = text.rpartition(" ")[2]
        elif text.startswith("| `") and current == heading:
            cells = [cell.strip() for cell in text.strip("|").split("|")]
            for line in _CODE.findall(cells[0])[:1]:
                yield line, cells


def _quotes(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in line.split(messages.GAP)), re.DOTALL)


@kept
def _ours() -> tuple[str, ...]:
    return tuple(messages.templates(messages.trees()))


@kept
def _theirs(release: str) -> str:
    """The connector's sources, each text of several literals in one."""
    root = cache.tree(release)
    paths = [path for path in (root / _CONNECTORS).rglob("*.py") if "nixl" in str(path)]
    paths += [root / _CONNECTORS / "utils.py", root / "vllm/v1/core/sched/scheduler.py"]
    return "".join(_SEAM.sub("", _COMMENT.sub("", path.read_text())) for path in paths)


# PATCHES.md, which takes all releases' sources, has a test beside the patches' own.
@pytest.mark.parametrize(
    "path", sorted(pages.GENERATED.keys() - {documents.PATCHES_MD}), ids=lambda path: path.name
)
def test_a_page_is_fresh(path: Path) -> None:
    expected = pages.GENERATED[path]()
    assert path.read_text() == expected, "run python -m tests.contract --pages"


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.name)
def test_tables_are_their_datas(path: Path) -> None:
    assert path.read_text() == tables.with_tables(path), "run python -m tests.contract --pages"


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.name)
def test_no_row_of_a_table_is_broken(path: Path) -> None:
    cells = 0
    for line in path.read_text().splitlines():
        found = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        is_row = line.startswith("| ") or line.startswith("|-")
        cells = cells or found if is_row else 0
        assert not is_row or (found == cells and line.endswith("|")), line


def test_a_table_that_was_changed_by_hand_shows() -> None:
    text = tables.README.read_text()
    changed = text.replace("23 of 23 fail", "23 of 23 identical", 1)

    assert changed != text
    assert tables.filled(changed, has_source=False) == text


def test_rows_that_were_changed_by_hand_show(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Prose.\n\n| x | y |\n|---|---|\n| 1 | by hand |\n\nMore.\n")

    found = tables.remade(page, tables.rows_below(("x", "y"), [("1", "2"), ("3", "4")]))

    assert found == "Prose.\n\n| x | y |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nMore.\n"
    with pytest.raises(LookupError, match="found 0"):
        tables.remade(page, tables.rows_below(("x", "z"), []))


def test_all_data_is_shown() -> None:
    used = {name for page in tables.pages() for name in tables.names_of(page.read_text())}
    drawn = {"heterogeneous", "kvcached", "unlike_releases"}

    assert {path.stem for path in tables.DATA.glob("*.json")} == used | drawn


def test_results_are_kept_as_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, runs, text = table.known_cells(), table.known_runs(), table.DATA.read_text()
    monkeypatch.setattr(table, "DATA", tmp_path / "kept.json")

    table.keep(cells, runs)

    assert table.DATA.read_text() == text


def test_results_of_kvcached_are_kept_and_shown_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, runs = kvcached_cells.read_cells(), kvcached_cells.known_runs()
    every = {" ".join(cell) for cell in kvcached_cells.cells()}
    assert known and all(set(found) == every for found in known.values())
    texts = kvcached_cells._CELLS.read_text(), kvcached_cells.PAGE.read_text()
    for name, text in zip(("_CELLS", "PAGE"), texts, strict=True):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(kvcached_cells, name, tmp_path / name)

    kvcached_cells.keep(known, runs)

    assert texts == (kvcached_cells._CELLS.read_text(), kvcached_cells.PAGE.read_text())
    release, cell = next(iter(known)), min(every)
    changed = known | {release: known[release] | {cell: ["works", "corrupts"]}}
    assert kvcached_cells.with_tables(texts[1], changed) != texts[1]


def test_each_result_says_where_it_is_from() -> None:
    for path in tables.DATA.glob("*.json"):
        data = json.loads(path.read_text())
        for row in data.get("releases", {"": data}).values():
            assert data["made_by"] and row["commit"]
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])


def test_every_variable_has_a_row_and_nothing_else_has() -> None:
    assert variables_page.names() == sorted(variables_page.meanings()), variables_page.PAGE


def test_what_nobody_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables_page, "meanings", lambda: {"KVPATCH_ANOTHER": "nothing"})

    with pytest.raises(LookupError, match="KVPATCH_ANOTHER"):
        variables_page.page()


def test_refusals_are_found_in_the_code() -> None:
    """Of each way to raise one: in place, by a function, by a class, with a cure of its own."""
    found = {refusal.text for refusal in messages.refusals()}
    parts = (
        "names no generation; there are",
        "is not a whole number of tokens",
        "recurrent state is split over ranks",
        "blocks of the host buffer, which has",
        "context parallelism), and its host buffer needs that",
    )

    assert all(any(part in text for text in found) for part in parts)


def test_every_fact_has_its_meaning() -> None:
    assert all(facts_table.meanings().values())


@pytest.mark.parametrize("line", list(dict.fromkeys(_l for _l, _ in _rows_of("kvpatch"))))
def test_a_line_of_kvpatch_exists(line: str) -> None:
    assert any(map(_quotes(line).search, _ours())), f"no string of kvpatch has {line!r}"


@pytest.mark.usefixtures("trees")
@pytest.mark.parametrize(("line", "cells"), list(_rows_of("vLLM")))
def test_a_line_of_vllm_is_of_these_releases(line: str, cells: Sequence[str]) -> None:
    found = [release for release in RELEASES if line in _theirs(release)]

    assert found and cells[1] == f"{found[0]} to {found[-1]}"
    assert found == list(RELEASES[RELEASES.index(found[0]) :][: len(found)])


def test_a_line_that_nobody_logs_is_noticed() -> None:
    assert not any(map(_quotes("a sentence … that nobody says").search, _ours()))


def test_readme_is_short() -> None:
    assert len(tables.README.read_text().splitlines()) <= _MOST_LINES_OF_README


def test_readme_names_what_is_supported() -> None:
    text = " ".join(tables.README.read_text().split())
    assert f"the {len(RELEASES)} releases of vLLM from {RELEASES[0]} to {RELEASES[-1]}" in text


def test_nothing_that_kvpatch_reads_is_corrupt() -> None:
    """What the first paragraph promises, of the results that the pictures are made from."""
    assert table.known_cells() and not [c for c in table.known_cells() if c.kvpatch == "corrupt"]


@pytest.mark.parametrize(
    "page", [*tables.pages(), *tables.ROOT.glob("C*.md")], ids=lambda path: path.name
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(_PATH.findall(page.read_text()))
    missing = [path for path in named if not (tables.ROOT / path).exists()]
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    found = {
        path
        for folder in ("kvpatch", "tests", "experiments")
        for text in (file.read_text() for file in (tables.ROOT / folder).rglob("*.py"))
        for path in re.findall(r"docs/[\w/]+\.md", text)
    }
    assert [path for path in found if not (tables.ROOT / path).exists()] == []
