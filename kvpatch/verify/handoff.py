"""What a proxy does between a prefill and a decode engine, for one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpatch._errors import KvpatchError

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


class RequestFailed(KvpatchError):
    """An engine answered with an error, or without what was asked for."""


@dataclass(frozen=True)
class Completion:
    """A greedy answer."""

    token_ids: tuple[int, ...]
    text: str


async def complete(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    token_ids: tuple[int, ...],
    max_tokens: int,
    request_id: str,
) -> Completion:
    """Ask one engine for a greedy completion."""
    body = await _post(client, url, _request(model, token_ids, max_tokens), request_id)
    return _completion(url, body)


async def prefill_then_decode(
    client: httpx.AsyncClient,
    prefill_url: str,
    decode_url: str,
    model: str,
    token_ids: tuple[int, ...],
    max_tokens: int,
    request_id: str,
) -> Completion:
    """Prefill on one engine, hand its cache to the other, and complete there.

    Both requests carry one ``request_id``: releases up to 0.12 find a request's blocks by it.
    """
    ask = {**_request(model, token_ids, 1), "kv_transfer_params": dict(_ASK_PREFILL)}
    prefilled = await _post(client, prefill_url, ask, request_id)
    params = prefilled.get("kv_transfer_params")
    if not params:
        raise RequestFailed(
            f"{prefill_url}: expected kv_transfer_params in the answer to a prefill, "
            f"found {sorted(prefilled)}; is a KV connector configured?"
        )
    body = await _post(
        client,
        decode_url,
        {**_request(model, token_ids, max_tokens), "kv_transfer_params": params},
        request_id,
    )
    return _completion(decode_url, body)


def _request(model: str, token_ids: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _post(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], request_id: str
) -> dict[str, Any]:
    response = await client.post(
        f"{url}/v1/completions",
        json=body,
        headers={"X-Request-Id": request_id},
        timeout=REQUEST_TIMEOUT_S,
    )
    if response.status_code != 200:
        raise RequestFailed(f"{url}: HTTP {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()
    return answer


def _completion(url: str, body: Mapping[str, Any]) -> Completion:
    choice = body["choices"][0]
    ids = choice.get("token_ids")
    if not ids:
        raise RequestFailed(f"{url}: expected token_ids in the answer, found {sorted(choice)}")
    return Completion(tuple(ids), choice["text"])
