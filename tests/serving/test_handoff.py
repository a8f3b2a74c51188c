"""Reading an answer token by token, from a server of this test's own (no vLLM)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvpatch.core.errors import RequestFailed
from kvpatch.tools.verify.handoff import Completion, Request, complete, prefill_then_decode

httpx = pytest.importorskip("httpx", reason="httpx is not installed")

pytestmark = pytest.mark.serving


def _chunk(token_ids: list[int] | None, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": token_ids, "text": text, "finish_reason": finish}]}


def _ask(
    events: list[dict[str, Any]] | int, *, pair: bool = False, salt: str = ""
) -> tuple[Completion, list[Any]]:
    """The completion, and the bodies that the stand-in server was sent."""
    bodies: list[Any] = []

    def answer(request: Any) -> Any:
        body = json.loads(request.content)
        bodies.append(body)
        if isinstance(events, int):
            return httpx.Response(events, text="no")
        if not body.get("stream"):
            return httpx.Response(200, json={"kv_transfer_params": {"remote_port": 7}})
        lines = [f"data: {json.dumps(event)}" for event in events]
        return httpx.Response(200, text="\n\n".join([*lines, "data: [DONE]", ""]))

    async def ask() -> Completion:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            request = Request("model", (1, 2), "id", salt)
            if pair:
                return await prefill_then_decode(client, "http://p", "http://d", request, 3)
            return await complete(client, "http://p", request, 3)

    return asyncio.run(ask()), bodies


def test_chunks_are_joined() -> None:
    completion, _ = _ask([_chunk([5], "a"), _chunk([6, 7], "b"), _chunk(None, "", "length")])
    assert (completion.token_ids, completion.text) == ((5, 6, 7), "ab")
    assert completion.first_token_s > 0


@pytest.mark.parametrize("salt", ["", "own"])
def test_the_decode_engine_gets_what_the_prefill_engine_answered(salt: str) -> None:
    completion, (first, second) = _ask([_chunk([5], "a")], pair=True, salt=salt)
    assert completion.token_ids == (5,)
    assert first["max_tokens"] == 1 and first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["max_tokens"] == 3 and second["kv_transfer_params"] == {"remote_port": 7}
    for body in (first, second):
        assert body.get("cache_salt", "") == salt


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (500, "HTTP 500: no"),
        ([_chunk([5], "a"), {"error": {"message": "load failed"}}], "load failed"),
        ([_chunk([5], "a"), _chunk([], "", "error")], "ended with an error"),
        ([_chunk(None, "a")], "expected token_ids"),
        ([], "expected token_ids"),
    ],
)
def test_what_is_no_answer_is_a_failure(events: Any, problem: str) -> None:
    with pytest.raises(RequestFailed, match=problem):
        _ask(events)
