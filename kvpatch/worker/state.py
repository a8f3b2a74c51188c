"""The state that kvpatch keeps of one worker or one scheduler; it lives and ends with them.

It stands on the object that it belongs to, under one name, so that two engines of one process
have nothing in common.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from kvpatch.core.installed import installed_facts
from kvpatch.core.releases import ReleaseFacts
from kvpatch.observe.book import Book
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.unpatched_workers import EqualBlockPeers

_NAME = "_kvpatch_state"
_Kind = TypeVar("_Kind")


@dataclass(eq=False)
class State:
    """The objects that kvpatch's modules keep for one owner, one object of each kind."""

    kept: dict[type, Any] = field(default_factory=dict, init=False)

    @cached_property
    def facts(self) -> ReleaseFacts:
        """Returns the facts of this process's release; a test of another release's sets them."""
        return installed_facts()

    def of(self, kind: type[_Kind]) -> _Kind:
        """Returns the one object of a kind; makes it at the first call."""
        found: _Kind | None = self.kept.get(kind)
        # Handshakes have threads of their own: one of two that ask wins.
        return self.kept.setdefault(kind, kind()) if found is None else found

    def held(self, kind: type[_Kind]) -> _Kind | None:
        """Returns the object of a kind; None where there is none yet."""
        return self.kept.get(kind)

    def hold(self, value: object) -> None:
        self.kept[type(value)] = value

    def drop(self, kind: type) -> None:
        self.kept.pop(kind, None)


@dataclass(eq=False)
class WorkerState(State):
    """The state of a connector's worker half.

    Attributes:
        is_host_buffered: True if its KV goes through a host buffer.
        planned_layout: the layout that it would have stated, where an allocator chose another.
        book: the samples of loads that it reports.
    """

    is_host_buffered: bool = False
    planned_layout: str | None = None
    book: Book = field(default_factory=Book)


@dataclass(eq=False)
class SchedulerState(State):
    """The state of a connector's scheduler half.

    Attributes:
        is_host_buffered: True if its workers' KV goes through host buffers.
        equal_peers: the peers whose blocks are as large as its own.
        has_stock_workers: True if one of its workers is known to be without kvpatch.
        book: the samples that it reports, where the release asks it for them (from 0.24).
    """

    is_host_buffered: bool = False
    equal_peers: EqualBlockPeers = field(default_factory=EqualBlockPeers)
    has_stock_workers: bool = False
    book: Book = field(default_factory=Book)


def worker_state(worker: Any) -> WorkerState:
    return _state(worker, WorkerState)


def held_by(owner: Any, kind: type[_Kind]) -> _Kind | None:
    """An owner's object of a kind; None too of what has no state, which none is made for."""
    state: State | None = getattr(owner, _NAME, None)
    return None if state is None else state.kept.get(kind)  # held(), in every step


def release_worker(worker: Any) -> ReleaseWorker:
    return ReleaseWorker(worker, worker_state(worker).facts)


def scheduler_state(scheduler: Any) -> SchedulerState:
    return _state(scheduler, SchedulerState)


def engine_state(owner: Any) -> State:
    """Returns the state of another object of vLLM's: its own scheduler, with one connector or
    several; its block manager, which may share it; the connector's metrics in the API server.
    """
    return _state(owner, State)


def share_with_manager(core: Any) -> None:
    """Makes the scheduler's state available at the block manager of vLLM's scheduler."""
    vars(core.kv_cache_manager)[_NAME] = engine_state(core)


def connectors_of(core: Any) -> Iterator[Any]:
    """The scheduler's connector, or those that a MultiConnector stands for."""
    connector = getattr(core, "connector", None)
    if connector is not None:
        yield from _each(connector)


def _each(connector: Any) -> Iterator[Any]:
    inner = getattr(connector, "_connectors", None)
    if not inner:
        yield connector
    for one in inner or ():  # a MultiConnector may have another one
        yield from _each(one)


def nixl_connectors_of(core: Any) -> Iterator[Any]:
    """The ones among these that are NIXL's."""
    place = engine_state(core).facts.connector
    kind = vars(sys.modules[place.module])[place.owner]
    return (connector for connector in connectors_of(core) if isinstance(connector, kind))


def schedulers_of(core: Any) -> Iterator[Any]:
    found = map(connector_scheduler, connectors_of(core))
    return (scheduler for scheduler in found if scheduler is not None)


def connector_scheduler(connector: Any) -> Any:
    """A connector's; None in workers, and of other connectors that have none."""
    return getattr(connector, "connector_scheduler", None)


def is_push(scheduler: Any) -> bool:
    """True if P writes to D, and D does not read; ``scheduler`` is a connector's half."""
    return hasattr(scheduler, "_push_pending_registrations")


def _state(owner: Any, kind: type[_Kind]) -> _Kind:
    held = vars(owner)
    found = held.get(_NAME)
    if found is None:  # handshakes have threads of their own: one of two that ask wins
        found = held.setdefault(_NAME, kind())
    state: _Kind = found
    return state
