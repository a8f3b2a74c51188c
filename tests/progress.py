"""A line at least every minute that says what a run is playing, and what is left of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

_EVERY_SECONDS = 50.0
#: Of what is left, the parts that have most tests are named.
_MOST_NAMED = 4


class Progress:
    """What is known of a run that pytest-xdist plays in several processes.

    Args:
        part_of: names the part of the run that a test belongs to.
        write: shows a line.
    """

    def __init__(self, part_of: Callable[[str], str], write: Callable[[str], None]) -> None:
        self._part_of, self._write = part_of, write
        self._left: set[str] = set()
        self._running: set[str] = set()
        self._total = self._failed = 0
        self._started = time.monotonic()
        self._is_over = threading.Event()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """All processes collect the same tests: the first of them begins the count."""
        if not self._total:
            self._left = set(ids)
            self._total = len(self._left)
            threading.Thread(target=self._tell, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A process begins a test."""
        self._running.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A process has set a test up, played it or taken it down."""
        self._failed += report.failed
        if report.when == "teardown":
            self._running.discard(report.nodeid)
            self._left.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """The last test is over."""
        self._is_over.set()

    def line(self) -> str:
        """The sentence."""
        minutes = (time.monotonic() - self._started) / 60
        playing = sorted({self._part_of(one) for one in tuple(self._running)})
        left = Counter(map(self._part_of, tuple(self._left))).most_common()
        named = [f"{count} of {part}" for part, count in left[:_MOST_NAMED]]
        others = sum(count for _, count in left[_MOST_NAMED:])
        return (
            f"tests: {self._total - len(self._left)} of {self._total} in {minutes:.0f} minutes, "
            f"{self._failed} failed; playing {', '.join(playing) or 'nothing yet'}; "
            f"left: {', '.join(named)}{f', {others} of others' if others else ''}"
        )

    def _tell(self) -> None:
        while not self._is_over.wait(_EVERY_SECONDS):
            self._write(self.line())
