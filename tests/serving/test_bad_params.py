"""Clients that send nonsense to real engines: each gets an error, and the next one its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpatch.core.installed import installed_facts
from kvpatch.tools.verify.engine import Engine, Options, PatchedSides, build_setups
from kvpatch.tools.verify.handoff import Request, complete, prefill_then_decode
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import require_kvpatch_as_asked, running, vocabulary
from tests.bad_params import bad_params

from .commands import ENGINES
from .described import disagreements

if TYPE_CHECKING:
    import httpx

pytestmark = ENGINES

_ANSWER = 8
_TOKENS = 150
_TO_P = {"do_remote_decode": True, "do_remote_prefill": False}
#: After so many bad ones comes a good one.
_GOOD_EVERY = 20


class Pair:
    """P, stock, and D with kvpatch; prompts that share nothing."""

    def __init__(self, client: httpx.AsyncClient, engines: list[Engine], words: list[int]) -> None:
        self.client = client
        self.prefill, self.decode = engines
        self.model = engines[0].spec.model
        self._words = words
        self._prompts = 0

    def prompt(self) -> tuple[int, ...]:
        """One whose first token no other has."""
        self._prompts += 1
        at = self._prompts % len(self._words)
        return tuple((self._words[at:] + self._words)[:_TOKENS])

    async def answer_of(self, engine: Engine, more: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of an answer; what the client sends is any JSON."""
        body = {"model": self.model, "prompt": self.prompt(), "max_tokens": 2, **more}
        response = await self.client.post(
            f"{engine.url}/v1/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
            timeout=120,
        )
        return response.status_code, response.text

    async def own_params(self) -> dict[str, Any]:
        """What P answers to a prompt, as good as it is for it."""
        _, text = await self.answer_of(self.prefill, {"kv_transfer_params": _TO_P, "max_tokens": 1})
        found: dict[str, Any] = json.loads(text)["kv_transfer_params"]
        return found

    async def require_good(self) -> None:
        """The next good request is answered as by an engine that computes all of it."""
        self.decode.require_alive()
        prompt = self.prompt()
        request = Request(self.model, prompt, f"good-{self._prompts}")
        urls = self.prefill.url, self.decode.url
        found = await prefill_then_decode(self.client, *urls, request, _ANSWER)
        alone = replace(request, request_id=f"{request.request_id}-single")
        single = await complete(self.client, self.prefill.url, alone, _ANSWER)
        assert found.token_ids == single.token_ids
        loaded = (await self.decode.rpc(self.client, "kvpatch_process_status"))[0]
        assert loaded["enabled"]


async def _play(folder: Path) -> list[str]:
    """What was not answered as it should be, in words."""
    import httpx
    from rich.console import Console

    options = Options(work_dir=folder, setups="kvpatch", kvpatch_on=PatchedSides.DECODE)
    (setup,) = build_setups(options, str(make_tiny_llama(folder / "model")))
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        running(setup.specs, client, options, Console(quiet=True)) as engines,
    ):
        await require_kvpatch_as_asked(client, engines)
        pair = Pair(client, engines, await vocabulary(client, engines[0]))
        await pair.require_good()
        described = engines if installed_facts().server_arguments else ()
        wrong = [said for engine in described for said in disagreements(engine)]
        wrong += await _offer_fields(pair)
        wrong += await _offer_requests(pair)
        await pair.require_good()
        return wrong + await _offer_to_stock(pair)


async def _offer_fields(pair: Pair) -> list[str]:
    wrong = []
    bad = bad_params(await pair.own_params())
    assert len(bad) >= 60
    for number, (field, params) in enumerate(bad, 1):
        status, text = await pair.answer_of(pair.decode, {"kv_transfer_params": params})
        # Nothing at all is sent where an object is empty, and not an object is FastAPI's to refuse.
        is_computed = status == 200 and params == []
        is_named = field in text or "extra_args" in text  # the release's own word for huge numbers
        if not is_computed and (not 400 <= status < 500 or not is_named):
            wrong.append(f"{field}: {str(params)[:100]}: HTTP {status}: {text[:200]}")
        pair.decode.require_alive()
        if number % _GOOD_EVERY == 0:
            await pair.require_good()
    return wrong


async def _offer_requests(pair: Pair) -> list[str]:
    """Bad requests whose parameters are good, and bad parameters by another door."""
    own = await pair.own_params()
    two = [pair.prompt(), pair.prompt()[:20]]
    found = {
        "two prompts": {"kv_transfer_params": own, "prompt": two},
        "two answers of a bad one": {"kv_transfer_params": {**own, "tp_size": 0}, "n": 2},
        "a stream": {"kv_transfer_params": {**own, "remote_block_ids": 7}, "stream": True},
        "another door": {"vllm_xargs": {"kv_transfer_params": "kv_transfer_params"}},
    }
    wrong = []
    for name, more in found.items():
        status, text = await pair.answer_of(pair.decode, more)
        if "kv_transfer_params" not in text or (status == 200 and name != "a stream"):
            wrong.append(f"{name}: HTTP {status}: {text[:200]}")
        await pair.require_good()
    # Nothing is loaded from a P that holds nothing.
    empty = {"kv_transfer_params": {**own, "remote_block_ids": []}}
    status, text = await pair.answer_of(pair.decode, empty)
    if status != 200:
        wrong.append(f"no blocks: HTTP {status}: {text[:200]}")
    return wrong


async def _offer_to_stock(pair: Pair) -> list[str]:
    """The control: P has no kvpatch, and one request with a missing field ends it."""
    import httpx

    own = await pair.own_params()
    del own["remote_block_ids"]
    with suppress(httpx.HTTPError):
        await pair.answer_of(pair.prefill, {"kv_transfer_params": own})
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
