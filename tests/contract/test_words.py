"""The documentation stays short, and docstrings and classes are easy to read and to find."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import messages, pages
from .tables import ROOT

pytestmark = pytest.mark.contract

_MOST_WORDS, _MOST_OF_A_PAGE = 30_000, 1_500
#: It includes PATCHES.md, which is generated.
_INCLUDES = ROOT / "docs" / "reference" / "patches.md"
_BY_HAND = sorted({*(ROOT / "docs").rglob("*.md")} - {*pages.GENERATED, _INCLUDES})

#: A docstring begins with a verb in the third person, or with a noun and its article.
_NO_BEGINNING = re.compile(r"(?:What|Whether|Of|As|Whose|Has|Those|With)\b")
#: Docstrings that still begin so. No folder may get more, and 0 stays 0.
_LEFT = {"kvpatch": 1, "kvpatch/tools": 0, "tests": 360, "experiments": 0}
#: Names of two classes each; no name may come to these.
_TWICE = {"Caches", "Copy", "Entry", "Outcome", "Place", "_Reading"}


def words(text: str) -> int:
    """Counts words; what has no letter and no digit (a table's bar) is none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


@pytest.mark.parametrize("page", _BY_HAND, ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    assert words(page.read_text()) <= _MOST_OF_A_PAGE


def test_all_pages_are_short() -> None:
    assert 0 < sum(words(page.read_text()) for page in _BY_HAND) <= _MOST_WORDS


def test_a_tables_bars_are_no_words() -> None:
    assert words("| a page | 1,500 |\n| --- | --- |\n") == 3


def _trees(folder: str) -> Iterator[ast.Module]:
    inner = [name for name in _LEFT if name.startswith(f"{folder}/")]
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not any(path.is_relative_to(ROOT / name) for name in inner):
            yield ast.parse(path.read_text())


def _fragments(tree: ast.Module) -> Iterator[str]:
    """Yields the docstrings that begin with none of what they should."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            document = ast.get_docstring(node) or ""
            if _NO_BEGINNING.match(document):
                yield document


@pytest.mark.parametrize("folder", _LEFT)
def test_no_docstring_begins_with_a_fragment(folder: str) -> None:
    found = [document for tree in _trees(folder) for document in _fragments(tree)]

    assert len(found) <= _LEFT[folder], found[-3:]


def test_a_fragment_is_noticed() -> None:
    tree = ast.parse('def f():\n    """Whether it is so."""\n\ndef g():\n    """Tells it."""\n')

    assert list(_fragments(tree)) == ["Whether it is so."]


def test_no_two_classes_have_one_name() -> None:
    found = Counter(
        node.name
        for tree in messages.modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )

    assert {name for name, count in found.items() if count > 1} <= _TWICE
