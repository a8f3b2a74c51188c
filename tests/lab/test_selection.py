"""Shares of the lab: together they are all of it, and each has the newest release whole."""

from __future__ import annotations

import pytest

from kvpatch.core.releases import RELEASES
from tests.conftest import release_of, unit_of

from .selection import Share, name_without, on_every_release, share

pytestmark = pytest.mark.lab
pytest_plugins = ("pytester",)

_PARTS = 6
_TESTS = [f"test_x.py::test_y[{number}]" for number in range(40)]


@pytest.mark.parametrize("test", _TESTS)
def test_each_release_is_in_one_share(test: str) -> None:
    for release in RELEASES:
        parts = [n for n in range(_PARTS) if Share(n, _PARTS).has(test, RELEASES, release)]
        assert len(parts) == 1


@pytest.mark.parametrize("part", range(_PARTS))
def test_a_share_meets_each_test_on_several_releases_and_they_are_not_the_same(part: int) -> None:
    found = [{r for r in RELEASES if Share(part, _PARTS).has(t, RELEASES, r)} for t in _TESTS]
    assert all(len(RELEASES) // _PARTS <= len(releases) for releases in found)
    assert set.union(*found) == set(RELEASES)
    assert set.intersection(*found) == set()


def test_the_name_is_one_on_all_releases() -> None:
    named = {name_without(r, f"tests/lab/test_x.py::test_y[{r}-HND 16]") for r in RELEASES}
    assert named == {"tests/lab/test_x.py::test_y[-HND 16]"}


@pytest.mark.parametrize("wanted", ["6/6", "1", "a/b", "-1/6", "1/0"])
def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("KVPATCH_TEST_SHARE", wanted)
    with pytest.raises(ValueError, match="KVPATCH_TEST_SHARE"):
        share()


def test_a_chosen_parameter_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody"):
        on_every_release(["a", "b"], ["nobody"])


def test_the_newest_release_and_what_is_marked_are_in_every_share(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lab's own conftest, without a lab."""
    newest, other = RELEASES[-1], RELEASES[0]
    pytester.makeconftest(
        "from tests.lab.conftest import pytest_collection_modifyitems, pytest_terminal_summary"
    )
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.parametrize("lab", [{other!r}, {newest!r}])
        @pytest.mark.parametrize("n", range(12))
        def test_shared(lab, n):
            pass

        @pytest.mark.every_release
        @pytest.mark.parametrize("lab", [{other!r}, {newest!r}])
        def test_marked(lab):
            pass
        """
    )
    monkeypatch.setenv("KVPATCH_TEST_RELEASES", "all")
    played: list[str] = []
    for part in range(3):
        monkeypatch.setenv("KVPATCH_TEST_SHARE", f"{part}/3")
        result = pytester.runpytest("-q", "-p", "no:cacheprovider", "--collect-only")
        found = [line for line in result.outlines if "::" in line]
        assert sum(newest in line for line in found) == 13
        assert sum("test_marked" in line for line in found) == 2
        played += [line for line in found if other in line and "test_shared" in line]
        result.stdout.fnmatch_lines([f"*KVPATCH_TEST_SHARE={part}/3*"])
    assert sorted(played) == sorted(set(played))
    assert len(played) == 12


def test_a_release_is_read_from_a_tests_name() -> None:
    """What sends all tests of one release to one process."""
    for release in RELEASES:
        for shape in (f"[{release}]", f"[HND 16-{release}-a]", f"[{release}-1-2.5]"):
            assert release_of(f"tests/lab/test_x.py::test_y{shape}") == release
    for pair in ("0.9.2-0.10.1.1", "0.10.1.1-0.9.2"):
        assert release_of(f"tests/lab/test_x.py::test_y[{pair}-a]") == "0.10.1.1"
    assert release_of("tests/lab/test_x.py::test_y[HND 16]") is None
    assert release_of("tests/contract/test_x.py::test_y[0.10.0]") is None


def test_one_release_alone_is_spread_by_file() -> None:
    test = "tests/lab/test_x.py::test_y[0.33.0-HND]"
    assert unit_of(test, ["0.32.0", "0.33.0"]) == "0.33.0"
    assert unit_of(test, ["0.33.0"]) == "tests/lab/test_x.py"
    assert unit_of("tests/patching/test_x.py::test_y", ["0.33.0"]).endswith("test_y")
