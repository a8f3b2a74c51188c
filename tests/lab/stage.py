"""``Stage``: any number of engines of one release, by name, alive at the same time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from .ancestor import Process
from .case import EngineSpec
from .engine_api import Ask, Failure, Left, Prompt, Seen, Served, Start, Timed
from .host import EXTRA, PORTS, Engine, Lab
from .releases import must_be_told

#: P must take part in every transfer: one that is stopped holds them all.
_TCP_ALONE = "self,tcp"
_WATCH_SECONDS = 20.0
_TOLD_SECONDS = 10.0
_HOLD_SECONDS = 5.0
_POLL_SECONDS = 0.001
_MOST_STEPS = 50


class Raised(RuntimeError):
    """What an engine raised: in vLLM the end of that engine."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.where}: {failure.kind}: {failure.message}\n{failure.trace}")
        self.failure = failure


@dataclass
class Actor:
    """An engine on a stage."""

    name: str
    spec: EngineSpec
    engine_id: str
    port: int
    process: Engine
    is_alive: bool = field(default=True, init=False)
    has_raised: bool = field(default=False, init=False)

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises:
        Raised: what the engine raised.
        """
        answer = self.process.call(method, *arguments)
        if isinstance(answer, Failure):
            self.has_raised = True
            raise Raised(answer)
        return answer

    # -- as P ----------------------------------------------------------------

    def compute(self, *prompts: Prompt, chunk_tokens: int = 0) -> list[Ask]:
        """Computes prompts, in one step or in chunks."""
        answers = self.call("compute", prompts, chunk_tokens)
        return [Ask(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def heard(self, prompts: Sequence[Prompt], seconds: float = _TOLD_SECONDS) -> set[str]:
        """The names of those prompts that P has heard were read."""
        return set(self.call("heard", seconds, [prompt.name for prompt in prompts]))

    # -- as D ----------------------------------------------------------------

    def ask(self, *asks: Ask) -> int:
        """Posts reads (or shakes hands first); the tokens that D said it will load."""
        return int(self.call("ask", asks))

    def complete(self, *asks: Ask) -> list[Served]:
        """Serves prompts that come together, with P's answers or without."""
        served: list[Served] = self.call("complete", asks, _WATCH_SECONDS)
        return served

    def timed(self, ask: Ask) -> Timed:
        """Reads one prompt, timed in D's own process."""
        timed: Timed = self.call("timed", ask, _WATCH_SECONDS)
        return timed

    def watch(self, *prompts: Prompt, seconds: float = _WATCH_SECONDS) -> Seen:
        """Steps until each is received or failed, or the time is over."""
        seen: Seen = self.call("watch", [prompt.name for prompt in prompts], seconds)
        if seen.standstill and seconds >= _WATCH_SECONDS:
            print(seen.standstill)  # pytest shows it where a test fails
        return seen

    def must_receive(self, *prompts: Prompt, seconds: float = _WATCH_SECONDS) -> None:
        """Asserts that the load of each ends well."""
        seen = self.watch(*prompts, seconds=seconds)
        assert seen.received == {prompt.name for prompt in prompts}, seen

    def must_hold(self, *prompts: Prompt) -> None:
        """Asserts that each is received, and that the cache holds what P had."""
        self.must_receive(*prompts)
        wrong, total = self.wrong(*prompts)
        assert (wrong, total > 0) == (0, True)

    def must_fail(self, *prompts: Prompt) -> None:
        """Asserts that the load of each fails."""
        seen = self.watch(*prompts)
        assert seen.failed == {prompt.name for prompt in prompts}, seen

    def must_log(self, prompt: Prompt, words: str) -> None:
        """Steps until an error with these words is logged, and asserts that one is."""
        end = time.monotonic() + _WATCH_SECONDS
        while not any(words in line for line in self.watch(prompt, seconds=0.1).logged):
            assert time.monotonic() < end, f"{words!r} was not logged"

    def finish(self, prompt: Prompt) -> str:
        """Steps until D has answered a prompt, some steps at most; what has become of it."""
        for _ in range(_MOST_STEPS):
            if self.call("scheduler.status", prompt.name).startswith("FINISHED"):
                break
            self.call("tick")
        return str(self.call("scheduler.status", prompt.name))

    def abort(self, prompt: Prompt) -> None:
        self.call("abort", prompt.name)

    def wrong(self, *prompts: Prompt) -> tuple[int, int]:
        """Wrong and total elements of what D holds of these."""
        wrong, total = self.call("compare", [prompt.name for prompt in prompts])
        return wrong, total

    def written(self, prompt: Prompt) -> int:
        """Bytes that have changed in the prompt's own blocks."""
        return int(self.call("written", prompt.name))

    def strays(self) -> int:
        """Bytes that have changed outside all requests' blocks."""
        return int(self.call("strays"))

    def left(self) -> Left:
        left: Left = self.call("left")
        return left

    def unlike(self) -> set[str]:
        """The ids of the engines that kvpatch reads from in place of the release."""
        return set(self.call("unlike_peers"))

    def age_peers(self) -> None:
        """Has the release let go of its peers when it meets the next one (from 0.24)."""
        self.call("age_peers")

    # -- the process ----------------------------------------------------------

    def hold(self) -> None:
        """Stops the process as it is; over TCP no transfer with it goes on.

        Raises:
            TimeoutError: one of its threads goes on.
        """
        os.kill(self.process.pid, signal.SIGSTOP)
        self.await_stop()

    @property
    def is_stopped(self) -> bool:
        """True if none of the process's threads goes on."""
        return _is_stopped(self.process.pid)

    def await_stop(self) -> None:
        """Waits until somebody has stopped the process.

        Raises:
            TimeoutError: one of its threads goes on.
        """
        end = time.monotonic() + _HOLD_SECONDS
        while not _is_stopped(self.process.pid):  # a thread may still be on its way there
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} does not stop")
            time.sleep(_POLL_SECONDS)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def die(self) -> None:
        """Kills the process, as a crash or the kernel does, and waits until its port is free."""
        ended = Process(self.process.pid)
        self.process.kill()
        ended.wait()
        self.is_alive = False


class Stage:
    """Starts engines from a lab's release; the end of the block stops them all.

    ::

        with Stage(lab) as stage:
            p, q = stage.prefill(spec), stage.prefill(other)
            d = stage.decode(third)
    """

    def __init__(self, lab: Lab, transports: str = _TCP_ALONE) -> None:
        self._lab = lab
        self._settings = (("UCX_TLS", transports),)
        self._actors: list[Actor] = []
        self._name = uuid.uuid4().hex[:6]
        self._prompts = 0

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for actor in self._actors:
            if actor.is_alive:
                actor.go_on()
        processes = [actor.process for actor in self._actors]
        dead = [actor.process for actor in self._actors if not actor.is_alive]
        # After an exception reads may be in flight, and NIXL crashes at both ends where
        # one lets go of them.
        if error is not None or any(actor.has_raised for actor in self._actors):
            dead = processes
        for process in dead:
            self._lab.discard(process)
        self._lab.dismiss(*(process for process in processes if process not in dead))

    def prefill(self, spec: EngineSpec, *, port: int = 0, engine_id: str = "") -> Actor:
        """Starts a P; with a port or an id of its own, one that has come back.

        It is stock, but for what kvpatch has to state where a handshake does not say it all.
        """
        if not spec.patched and must_be_told(replace(spec, patched=True), self._lab.release):
            spec = replace(spec, patched=True, patches=("unlike_engines",))
        return self._start("prefill", spec, port, engine_id)

    def decode(self, spec: EngineSpec, *, patched: bool = True) -> Actor:
        """Starts a D, with kvpatch if not told otherwise."""
        if patched:
            spec = replace(spec, patched=True)
        return self._start("decode", spec)

    def start(self, spec: EngineSpec, extra: Mapping[str, Any] = MappingProxyType({})) -> Actor:
        """Starts an engine as its spec has it, kvpatch and its variables included.

        Args:
            extra: of the connector's own configuration.
        """
        return self._start("engine", spec, extra=extra)

    def prompt(self, tokens: int) -> Prompt:
        """A prompt unlike any other of this stage."""
        self._prompts += 1
        return Prompt(f"req-{self._name}-{self._prompts}", self._prompts, tokens)

    def prompts(self, count: int, tokens: int) -> list[Prompt]:
        return [self.prompt(tokens) for _ in range(count)]

    def load(self, prefill: Actor, decode: Actor, tokens: int) -> Prompt:
        """Has D load a new prompt of P's, as P had it."""
        prompt = self.prompt(tokens)
        decode.ask(*prefill.compute(prompt))
        decode.must_hold(prompt)
        return prompt

    def _start(
        self,
        role: str,
        spec: EngineSpec,
        port: int = 0,
        engine_id: str = "",
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> Actor:
        name = f"{role}-{self._name}-{len(self._actors)}"
        spec = replace(spec, settings=spec.settings + self._settings)
        port = port or PORTS.take(spec.tp_size)
        actor = Actor(name, spec, engine_id or name, port, self._lab.hire(spec))
        self._actors.append(actor)
        more = {**EXTRA, **extra}
        actor.call("start", Start(spec, actor.engine_id, port, len(self._actors), more))
        return actor


def _is_stopped(pid: int) -> bool:
    """Whether every thread of a process is; one that ends meanwhile is none any more."""
    stats = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stats.append(task.joinpath("stat").read_text())
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
