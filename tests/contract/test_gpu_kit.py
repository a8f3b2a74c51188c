"""The stages for a GPU: their commands are there, and the page names each of them."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from experiments.gpu.__main__ import STAGES, said

from .tables import DATA, ROOT

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", STAGES)
def test_a_stages_commands_are_there(name: str) -> None:
    for command in STAGES[name].commands:
        if command[0] == "-m":
            assert find_spec(command[1]), command
        else:
            assert (ROOT / command[0]).is_file(), command


def test_the_page_has_a_row_for_each_stage() -> None:
    rows = json.loads((DATA / "gpu.json").read_text())["rows"]
    assert [row[0] for row in rows] == [f"`{name}`" for name in STAGES]


def test_what_went_wrong_is_said() -> None:
    rows = [{"what": "a", "is_right": True, "of_copy": 0.5}, {"what": "b", "is_right": False}]
    assert said({"rows": rows, "errors": ["exit 1: oh\nno"]}) == (
        "1 of 2 right; of a copy 0.50 to 0.50; exit 1: oh"
    )
