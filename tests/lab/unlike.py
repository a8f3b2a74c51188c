"""Pairs of unlike engines: a pairwise selection of everything that can differ.

The full product has some hundred thousand cells; a pairwise selection tries
every pair of values of any two dimensions at least once. A seed shuffles the
values, so that another seed gives another selection and the same seed the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from allpairspy import AllPairs

from .case import Case, EngineSpec, Family

BLOCK_TOKENS = (16, 32, 48, 64, 128)
PROMPTS = (1, 16, 17, 100, 150, 300)
HITS = ("none", "one block", "all but one", "all")
LAYOUTS = ("HND", "NHD")
DTYPES = ("fp8", "bfloat16", "float32")


@dataclass(frozen=True)
class Dimensions:
    """What is varied; every combination is one cell."""

    families: tuple[Family, ...] = ("flash", "flashinfer", "mla")
    prefill_tokens: tuple[int, ...] = BLOCK_TOKENS
    decode_tokens: tuple[int, ...] = BLOCK_TOKENS
    prefill_layouts: tuple[str, ...] = LAYOUTS
    decode_layouts: tuple[str, ...] = LAYOUTS
    prompts: tuple[int, ...] = PROMPTS
    hits: tuple[str, ...] = HITS
    dtypes: tuple[str, ...] = DTYPES
    requests: tuple[int, ...] = (1, 3)

    def values(self) -> list[tuple[object, ...]]:
        """The dimensions in a fixed order, for a product or a selection."""
        return [tuple(getattr(self, name)) for name in self.__dataclass_fields__]


def cases(dimensions: Dimensions, seed: int, *, full: bool = False) -> Iterator[Case]:
    """The selection (or the whole product) as cases; like pairs are left out."""
    values = [list(found) for found in dimensions.values()]
    shuffle = random.Random(seed)
    for found in values:
        shuffle.shuffle(found)
    rows = itertools.product(*values) if full else AllPairs(values)
    for row in rows:
        case = _case(*row)
        if case is not None:
            yield case


def _case(
    family: Family,
    prefill_tokens: int,
    decode_tokens: int,
    prefill_layout: str,
    decode_layout: str,
    prompt: int,
    hit: str,
    dtype: str,
    requests: int,
) -> Case | None:
    if family == "mla":  # one latent a token: the two layouts are the same bytes
        prefill_layout = decode_layout = "NHD"
    if family == "flashinfer":
        # Its kernels cut larger blocks into these; the lab's tensors have whole blocks.
        prefill_tokens, decode_tokens = (_kernel_tokens(n) for n in (prefill_tokens, decode_tokens))
    if (prefill_tokens, prefill_layout) == (decode_tokens, decode_layout):
        return None
    hit_tokens = _hit_tokens(hit, prompt, decode_tokens)
    prefill, decode = (
        EngineSpec(
            family,
            layout=layout,
            block_tokens=tokens,
            planned_blocks=_blocks(tokens, prompt, requests),
            kv_heads=2,
            head_dim=16 if family != "mla" else 64,
            dtype=dtype,
        )
        for layout, tokens in ((prefill_layout, prefill_tokens), (decode_layout, decode_tokens))
    )
    name = (
        f"{family} {dtype} P {prefill_layout} {prefill_tokens}, D {decode_layout} {decode_tokens}, "
        f"{requests} x {prompt} tokens, {hit} cached"
    )
    return Case(name, prefill, decode, prompt, hit_tokens, requests)


def _kernel_tokens(block_tokens: int) -> int:
    return next(n for n in (64, 32, 16) if block_tokens % n == 0)


def _blocks(tokens: int, prompt: int, requests: int) -> int:
    """Room for every request and some blocks that nobody may touch."""
    return requests * -(-prompt // tokens) + 6


def _hit_tokens(hit: str, prompt: int, decode_tokens: int) -> int:
    full = prompt // decode_tokens
    blocks = {"none": 0, "one block": min(1, full), "all but one": max(0, full - 1), "all": full}
    return blocks[hit] * decode_tokens
