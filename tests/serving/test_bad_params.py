"""Clients that send nonsense to real engines: each gets an error, and the next one its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpatch.core.installed import installed_facts
from kvpatch.tools.verify.engine import Engine, Options, PatchedSides, build_setups
from kvpatch.tools.verify.handoff import prefill_then_decode
from kvpatch.tools.verify.model import make_tiny_llama
from tests.bad_params import bad_params

from .commands import ENGINES
from .described import disagreements
from .pair import ANSWER_TOKENS, Pair, running_pair

pytestmark = ENGINES

_TOKENS = 150
#: After so many bad ones comes a good one.
_GOOD_EVERY = 20


async def _answer_of(pair: Pair, engine: Engine, more: Mapping[str, Any]) -> tuple[int, str]:
    """Status and text of an answer."""
    body = {"model": engine.spec.model, "prompt": pair.prompt(_TOKENS), "max_tokens": 2, **more}
    response = await pair.post(engine, body)
    return response.status_code, response.text


async def _require_good(pair: Pair) -> None:
    """The next good request is answered as by an engine that computes all of it."""
    pair.decode.require_alive()
    request = pair.request(pair.prompt(_TOKENS))
    urls = pair.prefill.url, pair.decode.url
    found = await prefill_then_decode(pair.client, *urls, request, ANSWER_TOKENS)
    alone = replace(request, request_id=f"{request.request_id}-single")
    assert found.token_ids == await pair.answer(pair.prefill, alone)
    loaded = (await pair.decode.rpc(pair.client, "kvpatch_process_status"))[0]
    assert loaded["enabled"]


async def _play(folder: Path) -> list[str]:
    """What was not answered as it should be, in words; P is stock, and D has kvpatch."""
    options = Options(work_dir=folder, setups="kvpatch", kvpatch_on=PatchedSides.DECODE)
    (setup,) = build_setups(options, str(make_tiny_llama(folder / "model")))
    async with running_pair(options, setup.specs) as pair:
        await _require_good(pair)
        described = (pair.prefill, pair.decode) if installed_facts().server_arguments else ()
        wrong = [said for engine in described for said in disagreements(engine)]
        wrong += await _offer_fields(pair)
        wrong += await _offer_requests(pair)
        await _require_good(pair)
        return wrong + await _offer_to_stock(pair)


async def _offer_fields(pair: Pair) -> list[str]:
    wrong = []
    bad = bad_params(await pair.prefilled(pair.prompt(_TOKENS)))
    assert len(bad) >= 60
    for number, (field, params) in enumerate(bad, 1):
        status, text = await _answer_of(pair, pair.decode, {"kv_transfer_params": params})
        # Nothing at all is sent where an object is empty, and not an object is FastAPI's to refuse.
        is_computed = status == 200 and params == []
        is_named = field in text or "extra_args" in text  # the release's own word for huge numbers
        if not is_computed and (not 400 <= status < 500 or not is_named):
            wrong.append(f"{field}: {str(params)[:100]}: HTTP {status}: {text[:200]}")
        pair.decode.require_alive()
        if number % _GOOD_EVERY == 0:
            await _require_good(pair)
    return wrong


async def _offer_requests(pair: Pair) -> list[str]:
    """Bad requests whose parameters are good, and bad parameters by another door."""
    own = await pair.prefilled(pair.prompt(_TOKENS))
    two = [pair.prompt(_TOKENS), pair.prompt(20)]
    found = {
        "two prompts": {"kv_transfer_params": own, "prompt": two},
        "two answers of a bad one": {"kv_transfer_params": {**own, "tp_size": 0}, "n": 2},
        "a stream": {"kv_transfer_params": {**own, "remote_block_ids": 7}, "stream": True},
        "another door": {"vllm_xargs": {"kv_transfer_params": "kv_transfer_params"}},
    }
    wrong = []
    for name, more in found.items():
        status, text = await _answer_of(pair, pair.decode, more)
        if "kv_transfer_params" not in text or (status == 200 and name != "a stream"):
            wrong.append(f"{name}: HTTP {status}: {text[:200]}")
        await _require_good(pair)
    # Nothing is loaded from a P that holds nothing.
    empty = {"kv_transfer_params": {**own, "remote_block_ids": []}}
    status, text = await _answer_of(pair, pair.decode, empty)
    if status != 200:
        wrong.append(f"no blocks: HTTP {status}: {text[:200]}")
    return wrong


async def _offer_to_stock(pair: Pair) -> list[str]:
    """The control: P has no kvpatch, and one request with a missing field ends it."""
    import httpx

    own = await pair.prefilled(pair.prompt(_TOKENS))
    del own["remote_block_ids"]
    with suppress(httpx.HTTPError):
        await _answer_of(pair, pair.prefill, {"kv_transfer_params": own})
    for _ in range(600):
        try:
            health = await pair.client.get(f"{pair.prefill.url}/health", timeout=60)
        except httpx.HTTPError:
            return []
        if health.status_code != 200:
            return []
        await asyncio.sleep(0.1)
    return ["a stock engine serves on without remote_block_ids"]


def test_bad_requests_fail_alone(tmp_path: Path) -> None:
    """The engines run anyway, so that they are held against their descriptions as well."""
    wrong = asyncio.run(_play(tmp_path))

    assert not wrong, "\n".join(wrong)
