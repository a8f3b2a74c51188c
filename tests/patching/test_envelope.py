"""What patches add to what schedulers and workers exchange travels in one message each way."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvpatch.worker.envelope import (
    answer,
    message_on,
    read_statement,
    read_step,
    write_message,
    write_statement,
    write_step,
)

from .test_engine_steps import replaced


@dataclass
class Metadata:
    """vLLM's own."""

    reqs: dict[str, int] = field(default_factory=dict)


class Connector:
    """vLLM's, of a worker or a scheduler."""

    def __init__(self, worker: Any = "worker", stated: Metadata | None = None) -> None:
        self.connector_worker = worker
        self.heard: list[Any] = []
        self._stated = stated

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        self.heard.append(scheduler_output)
        return Metadata({"a": 1})

    def bind_connector_metadata(self, connector_metadata: Any) -> str:
        self.heard.append(connector_metadata)
        return "bound"

    def get_handshake_metadata(self) -> Metadata | None:
        return self._stated

    def set_xfer_handshake_metadata(self, metadata: Any) -> str:
        self.heard.append(metadata)
        return "set"


def _build(**parts: Any) -> Any:
    return replaced(write_step, Connector.build_connector_meta, **parts)


def _bind(**parts: Any) -> Any:
    return replaced(read_step, Connector.bind_connector_metadata, **parts)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_message_goes_with_what_a_scheduler_tells_its_workers(by_name: bool) -> None:
    build = _build(
        first=lambda owner, output: lambda metadata: {"first": (output, dict(metadata.reqs))},
        silent=lambda *_: None,
        attaches=lambda *_: lambda metadata: metadata.reqs.update(b=2),
        second=lambda *_: lambda _: {"second": 2},
    )
    seen: list[Any] = []
    bind = _bind(
        first=lambda worker, message: seen.append((worker, message["first"])),
        second=lambda worker, message: seen.append((worker, message["second"])),
    )
    scheduler, worker = Connector(), Connector()

    built = build(scheduler, scheduler_output=5) if by_name else build(scheduler, 5)
    sent = pickle.loads(pickle.dumps(built))
    bound = bind(worker, connector_metadata=sent) if by_name else bind(worker, sent)

    assert (scheduler.heard, worker.heard, bound) == ([5], [sent], "bound")
    assert seen == [("worker", (5, {"a": 1})), ("worker", 2)]
    assert sent == Metadata({"a": 1, "b": 2}), "vLLM's own fields are as they were"


@pytest.mark.parametrize("parts", [{}, {"silent": lambda *_: None}])
def test_a_step_without_news_has_no_message(parts: dict[str, Any]) -> None:
    built = _build(**parts)(Connector(), 5)

    assert vars(built) == {"reqs": {"a": 1}}
    assert message_on(built) == {}
    calls: list[Any] = []
    assert _bind(first=lambda *told: calls.append(told))(worker := Connector(), built) == "bound"
    assert (worker.heard, calls) == ([built], [])


@pytest.mark.parametrize(
    "connector", [SimpleNamespace(heard=[]), SimpleNamespace(heard=[], connector_worker=None)]
)
def test_a_connector_without_a_worker_is_left_alone(connector: Any) -> None:
    write_message(metadata := Metadata(), {"first": 1})
    calls: list[Any] = []

    _bind(first=lambda *told: calls.append(told))(connector, metadata)

    assert (connector.heard, calls) == ([metadata], [])


def test_a_worker_states_one_message_and_its_scheduler_takes_it_in_turn() -> None:
    state = replaced(
        write_statement,
        Connector.get_handshake_metadata,
        first=lambda worker: {"first": worker},
        silent=lambda _: {},
        second=lambda _: {"second": 2},
    )
    seen: list[Any] = []

    def take(_: Any, metadata: dict[int, Metadata]) -> dict[int, Metadata]:
        seen.append(message_on(metadata[0]))
        return {0: Metadata({"by": len(seen)})}

    def keep(_: Any, metadata: Any) -> Any:
        seen.append(metadata)
        return metadata

    learn = replaced(read_statement, Connector.set_xfer_handshake_metadata, first=take, second=keep)
    stated = pickle.loads(pickle.dumps(state(Connector(stated=Metadata()))))
    scheduler = Connector()

    assert learn(scheduler, {0: stated}) == "set"

    amended = {0: Metadata({"by": 1})}
    assert seen == [{"first": "worker", "second": 2}, amended]
    assert scheduler.heard == [amended]
    assert msgspec.msgpack.encode(stated) == msgspec.msgpack.encode(Metadata()), "no peer sees it"


@pytest.mark.parametrize("worker", ["worker", None])
def test_nothing_is_stated_without_a_worker_or_its_metadata(worker: Any) -> None:
    state = replaced(
        write_statement, Connector.get_handshake_metadata, first=lambda _: {"first": 1}
    )
    assert state(Connector(worker)) is None
    stated = state(Connector(None, Metadata()))
    assert message_on(stated) == {}


@pytest.mark.parametrize("by_name", [False, True])
def test_an_answer_is_amended_by_one_patch_after_the_other(by_name: bool) -> None:
    def request_finished(self: Connector, request: Any, block_ids: Any) -> tuple[bool, Any]:
        self.heard.append((request, block_ids))
        return True, {"vLLM's": 1}

    def part(name: str) -> Any:
        def begin(connector: Connector, request: Any, blocks: Any) -> Any:
            connector.heard.append(name)
            return lambda found: (found[0], {**found[1], name: (request, blocks)})

        return begin

    parts = {"first": part("first"), "none": lambda *_: None, "second": part("second")}
    finished = replaced(answer, request_finished, **parts)
    connector = Connector()

    found = (
        finished(connector, block_ids=[1], request="a")
        if by_name
        else finished(connector, "a", [1])
    )

    assert connector.heard == ["first", "second", ("a", [1])]
    assert found == (True, {"vLLM's": 1, "first": ("a", [1]), "second": ("a", [1])})
    assert list(found[1]) == ["vLLM's", "first", "second"]
    assert replaced(answer, request_finished)(connector, "a", [1]) == (True, {"vLLM's": 1})
