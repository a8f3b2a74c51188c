"""When a load that does not get on is given up: once nothing is left that could end it."""

from __future__ import annotations

import queue
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .standstill import is_idle


def _worker(**more: Any) -> Any:
    idle = {
        "_handshake_futures": {},
        "_ready_requests": queue.Queue(),
        "_recving_transfers": {},
        "_recving_metadata": {},
    }
    return SimpleNamespace(**idle | more)


@pytest.fixture(autouse=True)
def _stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvpatch.worker.state", raising=False)


def _ready() -> Any:
    found: Any = queue.Queue()
    found.put("a")
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"_handshake_futures": {"p": object()}},
        {"_ready_requests": _ready()},
        {"_recving_transfers": {"a": [1]}},
        {"_recving_metadata": {"a": object()}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_worker_that_still_has_something_is_waited_for(more: dict[str, Any]) -> None:
    assert not is_idle(_worker(**more))


def test_one_that_has_forgotten_a_request_is_not() -> None:
    assert is_idle(_worker())
    without = _worker()
    del without._handshake_futures, without._recving_metadata  # as older releases are
    assert is_idle(without)


def test_one_with_kvpatch_is_always_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "kvpatch.worker.state"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not is_idle(_worker())
