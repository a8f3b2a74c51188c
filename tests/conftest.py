"""How tests are spread over processes: a release's lab tests all go to one. And no test is timed.

Importing a release takes as long as many of its tests. Where one release is played alone, its files
are spread instead, so that no process is left without work. pytest-xdist's own ``loadgroup`` does
the same by marks, and from pytest 9.2 on, without a word, no longer does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

from .progress import Progress

# On a busy machine an example of microseconds may take a second: that is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_RELEASE = re.compile(r"(?<=[\[-])\d+(?:\.\d+){2,3}(?=[\]-])")


def release_of(nodeid: str) -> str | None:
    """The release that a test of the lab is played on; None for any other test.

    Of two releases the newer one, so that both orders of a pair go to one process.
    """
    if not nodeid.startswith("tests/lab/"):
        return None
    found = [one for one in _RELEASE.findall(nodeid) if not one.startswith("127.")]
    return max(found, key=Version, default=None)


def unit_of(nodeid: str, releases: Sequence[str]) -> str:
    """What goes to one process with a test, where these releases are played."""
    release = release_of(nodeid)
    if release is None:
        return nodeid
    return nodeid.partition("::")[0] if list(releases) == [release] else release


def part_of(nodeid: str) -> str:
    """Names a test in a line of progress: a release's lab, or the folder that it is in."""
    release = release_of(nodeid)
    if release is not None:
        return f"the lab on {release}"
    path = nodeid.partition("::")[0]
    return path if path.startswith("tests/serving/") else path.rpartition("/")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Has the process that gives tests to others say how far they are."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):

        def write(line: str) -> None:
            terminal = config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"\n{line}")  # behind a row of dots

        config.pluginmanager.register(Progress(part_of, write))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadscope``."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    from tests.lab.releases import selected

    releases = selected()

    class ByRelease(LoadScopeScheduling):
        """One unit of work a release, and one for each of all other tests."""

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid, releases)

    return ByRelease(config, log)
