"""How tests are spread over processes: a release's lab tests all go to one. And no test is timed.

Importing a release takes as long as many of its tests. pytest-xdist's own ``loadgroup`` does the
same by marks, and from pytest 9.2 on, without a word, no longer does.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine an example of microseconds may take a second: that is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_RELEASE = re.compile(r"[\[-](\d+(?:\.\d+){2,3})[\]-]")


def release_of(nodeid: str) -> str | None:
    """The release that a test of the lab is played on; None for any other test."""
    if not nodeid.startswith("tests/lab/"):
        return None
    found = _RELEASE.search(nodeid)
    return None if found is None else found[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadscope``."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByRelease(LoadScopeScheduling):
        """One unit of work a release, and one for each of all other tests."""

        def _split_scope(self, nodeid: str) -> str:
            return release_of(nodeid) or nodeid

    return ByRelease(config, log)
