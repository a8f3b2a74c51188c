"""One lab per release for the whole session: importing a release takes seconds."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS
from tests.releases import kvcached
from tests.releases.fetch import FetchFailed, fetch

from .covered import covered
from .host import Lab
from .releases import (
    ends_of_generations,
    is_full,
    is_listed,
    newest,
    selected,
    some_ends_of_generations,
)
from .selection import share
from .stage import Stage


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The release's workers, ready for cases."""
    try:
        fetch([request.param])
        kvcached.fetch(kvcached.NEWEST)
    except FetchFailed as error:  # each other test would try it anew
        pytest.exit(f"{error}: the first run fetches releases from the package index", 2)
    with Lab(request.param) as opened:
        yield opened


_ERROR: pytest.StashKey[BaseException] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what a test has raised for its stage: reads may be in flight then."""
    report = yield
    if report.failed and call.excinfo is not None:
        item.stash[_ERROR] = call.excinfo.value
    return report


@pytest.fixture
def stage(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Engines of one test."""
    opened = Stage(lab)
    yield opened
    error = request.node.stash.get(_ERROR, None)
    opened.__exit__(error and type(error), error, None)


def _releases_for(node: pytest.Item) -> list[str]:
    """The releases on which a test is played where none are asked for by name.

    Where all releases are played, those alone that end a generation play what is marked
    ``one_per_generation``: seconds a test, and the same code in between. What is a product of
    two such, each played there by itself, is marked ``some_generations``: every third of them.
    """
    if node.get_closest_marker("every_release"):
        return selected()
    if node.get_closest_marker("some_generations"):
        return some_ends_of_generations()
    return ends_of_generations() if node.get_closest_marker("one_per_generation") else selected()


def _is_there(node: pytest.Item, release: str) -> bool:
    """True if the marks ``on`` of a test and its module let a release play it.

    Arguments of such a mark: `since`, `before`: releases. `has`: a function of one. All others are
    facts of it; True and False say whether there is anything.
    """
    for mark in node.iter_markers("on"):
        facts = dict(mark.kwargs)
        since, before = facts.pop("since", "0"), facts.pop("before", "99")
        if not Version(since) <= Version(release) < Version(before):
            return False
        if not facts.pop("has", lambda _: True)(release):
            return False
        for name, wanted in facts.items():
            found = getattr(FACTS[release], name)
            if (bool(found) if isinstance(wanted, bool) else found) != wanted:
                return False
    return True


def _everywhere(node: pytest.Item) -> list[str]:
    """The releases on which a test is played by all shares together."""
    chosen = selected() if is_listed() or is_full() else _releases_for(node)
    return [release for release in chosen if _is_there(node, release)]


def _played(node: pytest.Item) -> list[str]:
    """The releases on which this run plays a test: of the share's, and of the newest."""
    everywhere, part = _everywhere(node), share()
    if part is None or is_full() or node.get_closest_marker("every_release"):
        return everywhere
    name = node.nodeid.partition("[")[0]
    return [r for r in everywhere if r == newest() or part.has(name, everywhere, r)]


def _has_chosen(node: pytest.Item) -> bool:
    """True if some parameters of a test are marked ``every_release`` (selection.py)."""
    marks = [
        mark.name
        for parameters in node.iter_markers("parametrize")
        if isinstance(parameters.args[1], list)  # which alone has marks, and can be read twice
        for value in parameters.args[1]
        for mark in getattr(value, "marks", ())
    ]
    return "every_release" in marks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes no test of what the run does not play: to make all of them takes half a minute."""
    if "lab" in metafunc.fixturenames and "lab" not in vars(metafunc.module):
        node: Any = metafunc.definition
        releases = _everywhere(node) if _has_chosen(node) else _played(node)
        metafunc.parametrize("lab", releases, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is played on no release, or by other shares."""
    left_out = []
    for item in items:
        params = getattr(item, "callspec", None) and item.callspec.params or {}
        if "lab" in params and params["lab"] not in _played(item):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the run covered, where it was a share."""
    if share() is None:
        return
    terminalreporter.section("what of the lab was played")
    terminalreporter.line(covered())
