"""A pool is registered once, before any page of it is there, and resized under transfers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

#: Of 4 bytes, in a row that a process of `elastic` reads.
_WORDS_IN_ROW = 1 << 18
_REPOSITORY = Path(__file__).resolve().parents[2]


def _run(what: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(_REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", "tests.transfer.elastic", what],
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
        check=False,
    )


def test_a_resize_in_mid_transfer_moves_the_right_bytes() -> None:
    answer = _run("resize")

    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["meanwhile"]["resizes"] > 0, "the transfer was over before anything changed"
    for step in ("meanwhile", "grown", "again"):
        assert (found[step]["state"], found[step]["wrong"]) == ("DONE", 0), found
    assert found["control"]["wrong"] == 1


def test_a_page_that_is_not_there_does_not_pass_for_one_that_is() -> None:
    """The negative control: such a page reads as zeros, as kvcached's do, which the check shows."""
    answer = _run("stray")

    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])["stray"]
    assert found["wrong"] >= _WORDS_IN_ROW - 1, found  # one word of what was expected is zero
