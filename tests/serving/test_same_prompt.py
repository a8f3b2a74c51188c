"""Prompts of D that are not P's, by real engines: each answer is one engine's, computed afresh.

P and D have a side channel key, and strangers come to P's port before D does.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvpatch.core.errors import RequestFailed
from kvpatch.core.installed import installed_facts
from kvpatch.core.settings import SIDE_CHANNEL_KEY
from kvpatch.tools.verify.engine import TRANSFER_CONFIG, Engine, Options, build_setups
from kvpatch.tools.verify.model import make_tiny_llama
from tests.lab.side_channel import ask, question
from tests.strangers import FIRST_BYTES, answer_to, sent_of_a_large_frame

from .commands import ENGINES
from .pair import ANSWER_TOKENS, Pair, running_pair

pytestmark = ENGINES

_TOKENS = 137
_LARGE = 2**27
#: How much longer D's prompt is, and where another token stands in it.
_CASES: tuple[tuple[int, tuple[int, ...]], ...] = (
    *((more, ()) for more in (-67, -10, -1, 0, 1, 20, 96)),
    *((0, (edit,)) for edit in (0, 70, _TOKENS - 1)),
)
_BOTH_WAYS = {
    **TRANSFER_CONFIG,
    "kv_connector_extra_config": {"kv_lease_duration": 300, "bidirectional_kv_xfer": True},
}


async def _turn(
    pair: Pair, engine: Engine, prompt: tuple[int, ...], tokens: int, params: Mapping[str, Any]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The tokens of an answer, and the parameters that come with it."""
    body = {**pair.request(prompt).body(tokens), "kv_transfer_params": params}
    response = await pair.post(engine, body)
    assert response.status_code == 200, response.text[:300]
    found = response.json()
    return tuple(found["choices"][0]["token_ids"]), found["kv_transfer_params"]


async def _is_right(pair: Pair, prompt: tuple[int, ...], found: tuple[int, ...]) -> list[str]:
    """What is wrong with an answer, and with those to plain requests behind it, in words."""
    wanted = await pair.answer(pair.prefill, pair.request(prompt, is_fresh=True))
    wrong = [] if found == wanted else ["D's answer"]
    for engine in (pair.decode, pair.prefill):
        if await pair.answer(engine, pair.request(prompt)) != wanted:
            wrong.append(f"a later answer of {engine.spec.name}")
    return wrong


async def _strangers(pair: Pair, key: Path) -> list[str]:
    """What is wrong with how P takes strangers, and D a P of another key, in words."""
    own, other = key.read_bytes(), zmq.curve_keypair()[1]
    prompt = pair.prompt(_TOKENS)
    params = await pair.prefilled(prompt)
    key.write_bytes(other)
    wrong = []
    try:
        await pair.answer(pair.decode, pair.request(prompt), params)
        wrong.append("D loads from a P of another key")
    except RequestFailed:
        pass
    key.write_bytes(own)
    if "does not have this engine's side channel key" not in pair.decode.log.read_text():
        wrong.append("D does not say that P has another key")
    port, good = params["remote_port"], question(installed_facts().release, 0)
    if ask(port, b"", good, answer_ms=60_000, keys=(own, own)) is None:
        wrong.append("who has the key gets no answer")
    for keys in (None, (other, other), (own, other)):
        if ask(port, b"", good, keys=keys) is not None:
            wrong.append(f"a stranger gets an answer, with {keys and keys.count(own)} halves")
    answers = (asyncio.to_thread(answer_to, port, sent) for sent in FIRST_BYTES.values())
    for name, answer in zip(FIRST_BYTES, await asyncio.gather(*answers), strict=True):
        wrong += [name] if len(answer) > 64 else []
    if sent_of_a_large_frame(port, _LARGE) >= _LARGE:
        wrong.append("P takes in a large frame")
    return wrong


async def _one_turn(pair: Pair) -> list[str]:
    wrong = []
    for more, edits in _CASES:
        base = pair.prompt(_TOKENS + max(0, more))
        params = await pair.prefilled(base[:_TOKENS])
        prompt = list(base[: _TOKENS + more])
        for edit in edits:
            prompt[edit] = base[edit - 7]
        found = await pair.answer(pair.decode, pair.request(tuple(prompt)), params)
        wrong += [
            f"{more}, {edits}: {what}" for what in await _is_right(pair, tuple(prompt), found)
        ]
    prompt = pair.prompt(_TOKENS)
    params = await pair.prefilled(prompt)
    again = [pair.answer(pair.decode, pair.request(prompt), params) for _ in range(2)]
    answers = [*await asyncio.gather(*again)]
    answers.append(await pair.answer(pair.decode, pair.request(prompt), params))
    for found in answers:
        wrong += [f"an answer again: {what}" for what in await _is_right(pair, prompt, found)]
    return wrong


async def _two_turns(pair: Pair) -> list[str]:
    """P reads the first turn back from D, whose history then is kept, stripped or edited."""
    wrong = []
    for how in ("kept", "stripped", "edited"):
        prompt = pair.prompt(_TOKENS)
        answered, of_decode = await _turn(
            pair, pair.decode, prompt, ANSWER_TOKENS, await pair.prefilled(prompt)
        )
        history = [*prompt, *answered]
        if how == "stripped":
            del history[_TOKENS - 20 : _TOKENS + 2]
        if how == "edited":
            history[_TOKENS - 30] = prompt[3]
        second = (*history, *pair.prompt(30))
        _, of_prefill = await _turn(pair, pair.prefill, second, 1, of_decode)
        found = await pair.answer(pair.decode, pair.request(second), of_prefill)
        wrong += [f"history {how}: {what}" for what in await _is_right(pair, second, found)]
    return wrong


async def _play(folder: Path, block_tokens: int, digest: str) -> list[str]:
    like = block_tokens == 32
    options = Options(
        work_dir=folder,
        setups="kvpatch",
        p_args=f"--block-size {block_tokens}",
        engine_args=shlex.join(("--kv-transfer-config", json.dumps(_BOTH_WAYS))) if like else "",
    )
    (setup,) = build_setups(options, str(make_tiny_llama(folder / "model")))
    keys = [folder / f"key-{side}" for side in "pd"]
    secret = zmq.curve_keypair()[1]
    for key in keys:
        key.write_bytes(secret)
    specs = [
        replace(s, environment=(("KVPATCH_DIGEST", digest), (SIDE_CHANNEL_KEY, str(key))))
        for s, key in zip(setup.specs, keys, strict=True)
    ]
    async with running_pair(options, specs) as pair:
        # Before D has met P: a key counts at a handshake.
        wrong = await _strangers(pair, keys[1]) if like else []
        wrong += await _one_turn(pair)
        return wrong + (await _two_turns(pair) if like else [])


@pytest.mark.parametrize(("block_tokens", "digest"), [(32, "all"), (128, "off")])
def test_each_prompt_has_its_own_answer(tmp_path: Path, block_tokens: int, digest: str) -> None:
    wrong = asyncio.run(_play(tmp_path, block_tokens, digest))

    assert not wrong, "\n".join(wrong)
