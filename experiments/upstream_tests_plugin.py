"""Pytest plugin: enables kvpatch where the gate says so and writes down every test's result.

It runs inside vLLM's own test suite, for ``upstream_tests.py``. Importing it
comes before any test module is imported, as vLLM's plugins come before its
connector.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvpatch.auto  # noqa: F401

_OPTION = "--kvpatch-results"
_BREAK = "--break-kvpatch"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvpatch")
    group.addoption(_OPTION, required=True, type=Path, help="JSON file for the results")
    group.addoption(_BREAK, action="store_true", help="break kvpatch's own code")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(_BREAK):
        _break_kvpatch()
    config.pluginmanager.register(_Recorder(config.getoption(_OPTION)), "kvpatch-recorder")


class BrokenOnPurpose(Exception):
    """The error that the negative control raises from inside kvpatch."""


def _break_kvpatch() -> None:
    """Makes every registration of a KV cache that goes through kvpatch's wrapper fail."""
    from kvpatch.kvcached import pools

    def read_layers(*_: Any, **__: Any) -> Any:
        raise BrokenOnPurpose("the negative control broke kvpatch")

    if not hasattr(pools, "read_layers"):
        raise pytest.UsageError("the negative control finds no read_layers in pools")
    pools.read_layers = read_layers


class _Recorder:
    """Every test's result, and what kvpatch did in this process.

    A failure's result names the exception: a test that fails without kvpatch for
    want of a GPU and with kvpatch for another reason differs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report, "not collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        if report.failed:
            # A failure of the test itself says more than one of its teardown.
            if "failed" not in self._results.get(test, ""):
                self._fail(report, "failed" if report.when == "call" else f"{report.when} failed")
        elif report.skipped:
            self._results[test] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        elif report.when == "call":
            self._results[test] = "xpassed" if hasattr(report, "wasxfail") else "passed"

    def pytest_sessionfinish(self) -> None:
        record = {
            "results": self._results,
            "reasons": self._reasons,
            "kvpatch": kvpatch.status().as_dict(),
        }
        self._path.write_text(json.dumps(record, indent=1))

    def _fail(self, report: pytest.CollectReport | pytest.TestReport, how: str) -> None:
        reason = _ADDRESS.sub("0x", _message(report))
        exception = re.match(r"[\w.]+", reason)
        self._results[report.nodeid] = f"{how}: {exception.group()}" if exception else how
        self._reasons[report.nodeid] = reason


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip()
    lines = text.splitlines() or [""]
    return lines[0] if crash else lines[-1]
