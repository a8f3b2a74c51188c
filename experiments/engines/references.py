"""Answers of one engine alone, with which others' answers are compared.

A prompt is taken only if the engine prefers each token of its answer by a margin, so that another
rounding in a batch of another size cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from kvpatch.tools.verify.engine import Engine

MARGIN = 1e-3
"""In the logarithm of a probability, of float32 that rounds otherwise in another batch."""


@dataclass(frozen=True)
class Prompt:
    """One request and what the single engine answers to it."""

    token_ids: tuple[int, ...]
    answer: tuple[int, ...]


async def reference(
    client: httpx.AsyncClient,
    single: Engine,
    tokens: tuple[int, ...],
    answer_tokens: int,
    margin: float = MARGIN,
) -> Prompt | None:
    """The single engine's answer; None where it is a close thing."""
    response = await client.post(
        f"{single.url}/v1/completions",
        json={
            "model": single.spec.model,
            "prompt": list(tokens),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
        },
        timeout=300,
    )
    response.raise_for_status()
    choice = response.json()["choices"][0]
    margins = [max(top.values()) - min(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    return Prompt(tokens, tuple(choice["token_ids"])) if min(margins) > margin else None
