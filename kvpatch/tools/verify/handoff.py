"""Does a proxy's work between a prefill and a decode engine, for one prompt."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import LOOK_INTO_LOG, RequestFailed

if TYPE_CHECKING:
    import httpx

REQUEST_TIMEOUT_S = 300.0

_ASK_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Completion:
    """A greedy answer.

    Attributes:
        first_token_s: from sending the prompt to its first token.
        prefilled_s: from sending the prompt to the prefill engine's answer; 0 without one.
    """

    token_ids: tuple[int, ...]
    text: str
    first_token_s: float = 0.0
    prefilled_s: float = 0.0


@dataclass(frozen=True)
class Request:
    """A prompt, as one engine after the other is asked it.

    Attributes:
        request_id: of both: releases <= 0.12 find a request's blocks by it.
        cache_salt: requests of unlike ones share no prefix of an engine's cache.
    """

    model: str
    token_ids: tuple[int, ...]
    request_id: str
    cache_salt: str = ""

    def body(self, max_tokens: int) -> dict[str, Any]:
        salted = {"cache_salt": self.cache_salt} if self.cache_salt else {}
        return {
            **salted,
            "model": self.model,
            "prompt": list(self.token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


async def prefill_then_decode(
    client: httpx.AsyncClient, prefill_url: str, decode_url: str, request: Request, max_tokens: int
) -> Completion:
    """Prefills on one engine, hands its cache to the other, and completes there."""
    started = time.perf_counter()
    params = await prefill(client, prefill_url, request)
    prefilled_s = time.perf_counter() - started
    found = await complete(client, decode_url, request, max_tokens, params)
    first_token_s = prefilled_s + found.first_token_s
    return replace(found, first_token_s=first_token_s, prefilled_s=prefilled_s)


async def prefill(client: httpx.AsyncClient, url: str, request: Request) -> dict[str, Any]:
    """Prefills on one engine; returns the ``kv_transfer_params`` that a decode engine is sent."""
    response = await client.post(
        f"{url}/v1/completions",
        json={**request.body(1), "kv_transfer_params": dict(_ASK_PREFILL)},
        headers={"X-Request-Id": request.request_id},
        timeout=REQUEST_TIMEOUT_S,
    )
    _require_ok(response, response.text, url)
    answer = response.json()
    params: dict[str, Any] | None = answer.get("kv_transfer_params")
    if not params:
        raise RequestFailed(
            f"{url}: expected kv_transfer_params in the answer to a prefill, found "
            f"{sorted(answer)}",
            "start the engine with a --kv-transfer-config",
        )
    return params


async def complete(
    client: httpx.AsyncClient,
    url: str,
    request: Request,
    max_tokens: int,
    params: Mapping[str, Any] | None = None,
) -> Completion:
    """Completes a prompt on one engine, or what another has prefilled, which answered ``params``.

    Raises:
        RequestFailed: the engine answers with an error, or with no tokens.
    """
    body = {**request.body(max_tokens), "stream": True}
    if params is not None:
        body["kv_transfer_params"] = params
    started = time.perf_counter()
    token_ids: list[int] = []
    text = ""
    first_token_s = 0.0
    async with client.stream(
        "POST",
        f"{url}/v1/completions",
        json=body,
        headers={"X-Request-Id": request.request_id},
        timeout=REQUEST_TIMEOUT_S,
    ) as response:
        if response.status_code != 200:
            _require_ok(response, (await response.aread()).decode(errors="replace"), url)
        async for event in events(response.aiter_lines()):
            if "error" in event:
                raise RequestFailed(f"{url}: {json.dumps(event['error'])[:500]}", LOOK_INTO_LOG)
            for choice in event.get("choices", ()):
                if choice.get("finish_reason") == "error":
                    raise RequestFailed(f"{url}: the request ended with an error", LOOK_INTO_LOG)
                new = choice.get("token_ids") or ()
                if new and not token_ids:
                    first_token_s = time.perf_counter() - started
                token_ids += new
                text += choice["text"]
    if not token_ids:
        raise RequestFailed(f"{url}: expected token_ids in the answer, found none", LOOK_INTO_LOG)
    return Completion(tuple(token_ids), text, first_token_s)


def _require_ok(response: httpx.Response, text: str, url: str) -> None:
    if response.status_code != 200:
        raise RequestFailed(f"{url}: HTTP {response.status_code}: {text[:500]}", LOOK_INTO_LOG)


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON bodies of a server-sent event stream."""
    async for line in lines:
        kind, _, data = line.partition(":")
        if kind == "data" and data.strip() != "[DONE]":
            yield json.loads(data)
