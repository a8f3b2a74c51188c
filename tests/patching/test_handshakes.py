"""What a handshake's thread sees of the worker, and what the engine's step sees meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import wrapt

from kvpatch.core.proxies import bound_to, lookalike


class Topology:
    def __init__(self) -> None:
        self.heads, self.engines = 4, {}


class Base:
    """As releases have it: one method is called, which calls others and adds to what there is."""

    def __init__(self) -> None:
        self.layout, self.topology, self.agents = "NHD", Topology(), {}
        self.is_shut = self.permutes = False
        self.may_end, self.is_inside = threading.Event(), threading.Event()

    def add_agent(self, name: str) -> str:
        self.topology.engines[name] = self.topology.heads
        self.is_inside.set()
        assert self.may_end.wait(20)
        self._check()
        self.agents[name] = self.layout
        return self.layout

    def _check(self) -> None:
        self.permutes = self.layout == "HND"

    def __del__(self) -> None:
        self.is_shut = True


class Worker(Base):
    def _check(self) -> None:
        super()._check()


def test_a_step_sees_the_workers_own_values_while_a_handshake_waits_for_nixl() -> None:
    worker, found = Worker(), []
    shown = lookalike(worker, layout="HND", topology=lookalike(worker.topology, heads=8))
    add = bound_to(shown, worker.add_agent)
    handshake = threading.Thread(target=lambda add=add: found.append(add("p")))

    handshake.start()
    assert worker.is_inside.wait(20)
    assert (worker.layout, worker.topology.heads, worker.permutes) == ("NHD", 4, False)
    worker.may_end.set()
    handshake.join()
    del shown, add, handshake

    # It has seen the values that were shown, and what it has written is the worker's.
    assert found == ["HND"]
    assert (worker.layout, worker.topology.heads) == ("NHD", 4)
    assert (worker.agents, worker.topology.engines) == ({"p": "HND"}, {"p": 8})
    assert worker.permutes
    assert not worker.is_shut


def test_another_plugins_wrapper_below_ours_is_called_once(monkeypatch: Any) -> None:
    calls: list[str] = []

    @wrapt.decorator
    def noting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append(instance.layout)
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(Base, "add_agent", noting(Base.add_agent))
    worker = Worker()
    worker.may_end.set()

    assert bound_to(lookalike(worker, layout="HND"), worker.add_agent)("p") == "HND"
    assert calls == ["HND"]


def test_another_plugins_method_above_ours_may_call_it_by_its_class(monkeypatch: Any) -> None:
    @wrapt.decorator
    def shown(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return bound_to(lookalike(instance, layout="HND"), wrapped)(*args, **kwargs)

    ours = shown(Base.add_agent)
    monkeypatch.setattr(Base, "add_agent", ours)
    by_its_class = Base.add_agent
    monkeypatch.setattr(Base, "add_agent", lambda self, name: by_its_class(self, name))
    worker = Worker()
    worker.may_end.set()

    assert worker.add_agent("p") == "HND"
    assert worker.agents == {"p": "HND"}
