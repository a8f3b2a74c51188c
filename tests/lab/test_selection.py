"""Shares of the lab: together they are all of it, and each has the newest release whole."""

from __future__ import annotations

import pytest

from kvpatch.core.releases import RELEASES

from .releases import ends_of_generations
from .selection import Share, share

pytestmark = pytest.mark.lab
pytest_plugins = ("pytester",)

_PARTS = 6
_TESTS = [f"test_x.py::test_y[{number}]" for number in range(40)]


def test_each_release_is_in_one_share_and_no_share_has_all_of_a_tests_releases() -> None:
    for test in _TESTS:
        found = [
            {r for r in RELEASES if Share(n, _PARTS).has(test, RELEASES, r)} for n in range(_PARTS)
        ]
        assert sorted(r for part in found for r in part) == sorted(RELEASES)
        assert all(len(RELEASES) // _PARTS <= len(part) for part in found)


@pytest.mark.parametrize("wanted", ["6/6", "1", "a/b", "-1/6", "1/0"])
def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("KVPATCH_TEST_SHARE", wanted)
    with pytest.raises(ValueError, match="KVPATCH_TEST_SHARE"):
        share()


def test_the_newest_release_and_what_is_marked_are_in_every_share(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lab's own conftest, without a lab."""
    newest, ends = RELEASES[-1], ends_of_generations()
    pytester.makeconftest(
        "from tests.lab.conftest import lab, pytest_collection_modifyitems, pytest_generate_tests\n"
        "from tests.lab.conftest import pytest_terminal_summary"
    )
    names = [f"test_shared_{number}" for number in range(12)]
    shared = "".join(f"def {name}(lab): pass\n" for name in names)
    pytester.makepyfile(
        f"""
import pytest
{shared}
@pytest.mark.every_release
def test_marked(lab): pass

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.every_release), 2])
def test_one_is_marked(n, lab): pass

@pytest.mark.on(since="0.33", names_layouts=True, has=lambda release: release != "0.32.0")
def test_of_the_newest(lab): pass

@pytest.mark.on(before="0.10")
def test_of_none(lab): pass
"""
    )
    monkeypatch.delenv("KVPATCH_TEST_RELEASES", raising=False)
    played: list[str] = []
    for part in range(3):
        monkeypatch.setenv("KVPATCH_TEST_SHARE", f"{part}/3")
        result = pytester.runpytest("-q", "-p", "no:cacheprovider", "--collect-only")
        found = [line for line in result.outlines if "::" in line]
        assert sum("shared" in line and newest in line for line in found) == len(names)
        assert sum("test_marked" in line for line in found) == len(ends)
        assert sum("is_marked" in line and line.endswith("-1]") for line in found) == len(ends)
        assert [line for line in found if "test_of_" in line][0].endswith(f"newest[{newest}]")
        assert not any("test_of_none" in line for line in found)
        played += [line for line in found if "shared" in line and newest not in line]
        result.stdout.fnmatch_lines([f"*KVPATCH_TEST_SHARE={part}/3*"])
    assert sorted(played) == sorted(set(played))
    assert len(played) == len(names) * (len(ends) - 1)
