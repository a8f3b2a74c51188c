"""Several patches have a part in one call of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpatch.core.ledger import Parts
from kvpatch.worker.engine_steps import Around, amend, around

SAID: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    SAID.clear()


def vllms(owner: Any, *given: Any) -> Any:
    SAID.append(f"vLLM {owner} {given}")
    return "what vLLM returns"


def replaced(how: Callable[..., Any], method: Callable[..., Any], **parts: Any) -> Any:
    """A method with these parts."""
    held = Parts()
    for slug, part in parts.items():
        held.put(slug, part)
    return how(method, held)


def test_results_are_taken_by_each_before_and_behind() -> None:
    call = replaced(
        around,
        vllms,
        first=Around(after=lambda worker, found: SAID.append(f"first {worker}: {found}")),
        second=Around(before=lambda worker: SAID.append(f"second {worker}")),
        third=Around(after=lambda worker, found: SAID.append(f"third {worker}: {found}")),
    )

    assert call("worker", 1) == "what vLLM returns"

    assert SAID == [
        "second worker",
        "vLLM worker (1,)",
        "first worker: what vLLM returns",
        "third worker: what vLLM returns",
    ]


def test_what_is_returned_is_amended_by_one_after_the_other() -> None:
    call = replaced(
        amend,
        vllms,
        first=lambda owner, found: f"{found}, first of {owner}",
        second=lambda owner, found: f"{found}, second of {owner}",
    )

    assert call("worker") == "what vLLM returns, first of worker, second of worker"


def test_parts_come_and_go_while_the_function_stands() -> None:
    held, part = Parts(), Around(before=lambda worker: SAID.append("before"))
    call = around(vllms, held)
    called = "vLLM worker ()"

    for change, expected in (
        (lambda: held.put("first", part), ["before", called]),
        (lambda: held.put("second", part), ["before", "before", called]),
        (held.clear, [called]),
        (lambda: held.put("second", part), ["before", called]),
    ):
        SAID.clear()
        change()
        call("worker")
        assert expected == SAID


def test_an_answer_is_amended_by_those_who_were_on_when_it_was_asked_for() -> None:
    held = Parts()

    def switched_off_meanwhile(owner: Any) -> str:
        held.clear()
        return "found"

    held.put("first", lambda owner, found: f"{found}, amended")
    assert amend(switched_off_meanwhile, held)("worker") == "found, amended"


def test_without_parts_a_call_is_as_it_was() -> None:
    """As where kvpatch was switched off and somebody else has wrapped the call since."""
    assert replaced(around, vllms)("worker") == "what vLLM returns"
    assert replaced(amend, vllms)("worker") == "what vLLM returns"
