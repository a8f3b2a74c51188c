"""Several patches have a part in one call of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.connector.engine_steps import (
    Around,
    begin_loads,
    bind_metadata,
    build_metadata,
    take_results,
)

pytestmark = pytest.mark.patching

SAID: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    SAID.clear()


def _wrapped(*found: Any) -> Any:
    SAID.append(f"vLLM {found}")
    return "what vLLM returns"


def test_results_are_taken_by_each_before_and_behind() -> None:
    steps = {
        "first": Around(after=lambda worker, found: SAID.append(f"first {worker}: {found}")),
        "second": Around(before=lambda worker: SAID.append(f"second {worker}")),
        "third": Around(after=lambda worker, found: SAID.append(f"third {worker}: {found}")),
    }

    assert take_results(_wrapped, "worker", (), {}, steps=steps) == "what vLLM returns"

    assert SAID == [
        "second worker",
        "vLLM ()",
        "first worker: what vLLM returns",
        "third worker: what vLLM returns",
    ]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_worker_hears_of_metadata_before_it_is_bound(by_name: bool) -> None:
    steps = {
        slug: lambda worker, metadata, slug=slug: SAID.append(f"{slug} {worker} {metadata}")
        for slug in ("first", "second")
    }
    instance = SimpleNamespace(connector_worker="worker")
    args, kwargs = ((), {"connector_metadata": 7}) if by_name else ((7,), {})

    bind_metadata(_wrapped, instance, args, kwargs, steps=steps)

    assert SAID == ["first worker 7", "second worker 7", "vLLM (7,)"]


@pytest.mark.parametrize("instance", [SimpleNamespace(), SimpleNamespace(connector_worker=None)])
def test_a_connector_without_a_worker_is_left_alone(instance: Any) -> None:
    steps = {"first": lambda *_: SAID.append("first")}
    assert bind_metadata(_wrapped, instance, (7,), {}, steps=steps) == "what vLLM returns"
    assert SAID == ["vLLM (7,)"]


@pytest.mark.parametrize("enters", [False, True])
def test_loads_begin_inside_of_what_one_patch_asks_for(enters: bool) -> None:
    @contextmanager
    def meanwhile() -> Iterator[None]:
        SAID.append("enter")
        yield
        SAID.append("leave")

    steps = {
        "first": lambda *_: meanwhile() if enters else None,
        "second": lambda *_: SAID.append("second"),  # which returns nothing
    }

    begin_loads(_wrapped, "worker", (7,), {}, steps=steps)

    inside = ["vLLM (7,)"]
    assert ["second", *(["enter", *inside, "leave"] if enters else inside)] == SAID


@pytest.mark.parametrize("by_name", [False, True])
def test_metadata_is_built_once_and_told_by_those_who_have_something(by_name: bool) -> None:
    steps = {
        "first": lambda owner, output: lambda metadata: SAID.append(f"{owner} {output} {metadata}"),
        "second": lambda owner, output: SAID.append("nothing to tell"),
    }
    args, kwargs = ((), {"scheduler_output": 5}) if by_name else ((5,), {})

    found = build_metadata(_wrapped, "owner", args, kwargs, steps=steps)

    assert found == "what vLLM returns"
    assert SAID == ["nothing to tell", "vLLM (5,)", "owner 5 what vLLM returns"]


def test_without_parts_a_call_is_as_it_was() -> None:
    """As where kvpatch was switched off and somebody else has wrapped the call since."""
    assert take_results(_wrapped, "worker", (), {}, steps={}) == "what vLLM returns"
    assert begin_loads(_wrapped, "worker", (7,), {}, steps={}) == "what vLLM returns"
    assert build_metadata(_wrapped, "owner", (5,), {}, steps={}) == "what vLLM returns"
