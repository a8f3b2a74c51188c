"""Keeps the progress thread out of one NIXL agent where stock has nobody either.

A release makes its agent without locks of NIXL's own (``NIXL_THREAD_SYNC_NONE``), and NIXL's
bindings let go of the interpreter's lock while they work. The engine's own threads, the one of
its steps and the one of its handshakes, share the agent as they do without kvpatch. The progress
thread makes the calls of a step, beside a handshake and never beside the step; its
``initialize_xfer`` reads the tables of NIXL's that ``make_prepped_xfer`` does. What no release does
beside a handshake, to register memory, it does alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock, get_ident
from typing import Any, TypeVar

from kvpatch.core.proxies import AgentProxy

_Found = TypeVar("_Found")

#: What belongs to steps. All else may take long: it belongs to handshakes.
STEP_CALLS = frozenset(
    {
        "check_remote_metadata",
        "check_xfer_state",
        "get_new_notifs",
        "get_xfer_telemetry",
        "initialize_xfer",
        "make_prepped_xfer",
        "release_xfer_handle",
        "send_notif",
        "transfer",
    }
)
#: What takes away what other calls use: nobody else is in the agent meanwhile, as in stock.
REMOVING_CALLS = frozenset({"deregister_memory", "remove_remote_agent"})
#: What needs no agent.
_FREE_CALLS = frozenset({"get_reg_descs", "get_xfer_descs"})
#: How long the progress thread stays away for, once an engine's thread waits.
_STEP_ASIDE_SECONDS = 2e-5
#: Looks of steps at transfers in a row.
_MOST_UNANSWERED = 16


class EngineLock:
    """A lock of an engine's threads; the progress thread lets those go first that wait for it."""

    def __init__(self) -> None:
        #: One for each thread that waits; its ends are changed in one go, as a number is not.
        self._waiting: deque[None] = deque()
        # One thread may enter twice: whatever it collects there may let go of a transfer.
        self._lock = RLock()
        #: The thread that is alone in it.
        self._inside: int | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Takes the lock while inside, before the progress thread does; for an engine's thread."""
        if not self._lock.acquire(blocking=False):
            self._waiting.append(None)
            try:  # a signal's exception may end the wait
                self._lock.acquire()
            finally:
                self._waiting.pop()
        before, self._inside = self._inside, get_ident()
        try:
            yield
        finally:
            self._inside = before
            self._lock.release()

    def call(self, made: Callable[..., _Found], *args: Any, **kwargs: Any) -> _Found:
        with self.first():
            return made(*args, **kwargs)

    def call_now(self, made: Callable[..., _Found], *args: Any) -> _Found | None:
        """None where somebody else is inside."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return made(*args)
        finally:
            self._lock.release()

    @contextmanager
    def unless_taken(self) -> Iterator[bool]:
        """Takes the lock while inside and yields True; yields False if another has it or waits."""
        is_ours = not self._waiting and self._lock.acquire(blocking=False)
        try:
            if is_ours:
                with self._entered():
                    yield True
            else:
                yield False
        finally:
            if is_ours:
                self._lock.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Takes the lock while inside, after the threads that wait for it."""
        # Whoever is inside already must not wait for those who wait for it.
        while self._waiting and self._inside != get_ident():
            time.sleep(_STEP_ASIDE_SECONDS)
        with self._lock, self._entered():
            yield

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before, self._inside = self._inside, get_ident()
        try:
            yield
        finally:
            self._inside = before


class _Messages:
    """The notifications that the progress thread has received in place of the engine's step."""

    def __init__(self) -> None:
        self.are_wanted = False
        self.heard: deque[Mapping[Any, list[Any]]] = deque()

    def taken_with(self, found: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
        """Returns all messages that were added, and behind them those that were found just now."""
        if not self.heard:
            return found
        self.heard.append(found)
        taken: dict[Any, list[Any]] = {}
        while self.heard:
            for sender, messages in self.heard.popleft().items():
                taken.setdefault(sender, []).extend(messages)
        return taken


class AgentGate:
    """The locks of one agent. Neither a step nor the progress thread waits for a handshake."""

    def __init__(self) -> None:
        self._steps, self._handshakes = EngineLock(), EngineLock()
        self.messages = _Messages()

    def side_of(self, name: str) -> EngineLock:
        """Returns the lock that an engine's call of that name takes."""
        return self._steps if name in STEP_CALLS else self._handshakes

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Keeps everybody else out of the agent while inside; for an engine's thread."""
        with self._handshakes.first(), self._steps.first():
            yield

    def without_handshakes(self) -> AbstractContextManager[bool]:
        """Keeps handshakes out of the agent while inside; yields False at once if one is in it."""
        return self._handshakes.unless_taken()

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Lets the progress thread make a call of that name, while inside."""
        apart = nullcontext() if name in STEP_CALLS else self._handshakes.alone()
        with apart, self._steps.alone():
            yield


class EngineAgent(AgentProxy):
    """A NIXL agent as the engine's threads may use it beside the progress thread.

    A step asks for messages and for the states of transfers. It does not wait for that: where
    the progress thread is in the agent, it hears what that thread has heard on its behalf.
    """

    def __init__(self, agent: Any, gate: AgentGate) -> None:
        super().__init__(agent)
        self._self_gate = gate
        self._self_steps = gate.side_of("check_xfer_state")
        self._self_unanswered = 0

    @property
    def gate(self) -> AgentGate:
        return self._self_gate

    def check_xfer_state(self, handle: Any) -> Any:
        """Returns NIXL's state of a transfer; ``PROC`` for a short time if the agent is busy."""
        look = self.__wrapped__.check_xfer_state
        if self._self_unanswered < _MOST_UNANSWERED:
            found = self._self_steps.call_now(look, handle)
            if found is None:
                self._self_unanswered += 1
                return "PROC"
        else:
            found = self._self_steps.call(look, handle)
        if self._self_unanswered:
            self._self_unanswered = 0
        return found

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> Any:
        """Returns NIXL's notifications, {sender: messages}; does not wait for another thread."""
        if args or kwargs:
            return self._self_steps.call(self.__wrapped__.get_new_notifs, *args, **kwargs)
        messages = self._self_gate.messages
        found = self._self_steps.call_now(self.__wrapped__.get_new_notifs)
        messages.are_wanted = found is None
        return messages.taken_with(found or {})

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__wrapped__, name)
        if not callable(found) or name in _FREE_CALLS:
            return found
        gate, side = self._self_gate, self._self_gate.side_of(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return side.call(found, *args, **kwargs)

        def call_alone(*args: Any, **kwargs: Any) -> Any:
            with gate.emptied():
                return found(*args, **kwargs)

        return call_alone if name in REMOVING_CALLS else call


class ProgressAgent(AgentProxy):
    def __init__(self, agent: Any, gate: AgentGate) -> None:
        super().__init__(agent)
        self._self_gate = gate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__wrapped__, name)
        if not callable(found) or name in _FREE_CALLS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            gate = self._self_gate
            with gate.entered(name):
                result = found(*args, **kwargs)
                if gate.messages.are_wanted:  # the engine's step did not wait for this call
                    gate.messages.are_wanted = False
                    gate.messages.heard.append(self.__wrapped__.get_new_notifs())
                return result

        return call
