"""The host buffer over torch_xla's CPU device: real XLA tensors, which have no storage.

By real connectors over real NIXL, on the last release whose own code serves such devices, built
for this torch. Contents are numbers: XLA makes one NaN of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.releases.fetch import fetch

from .case import XLA, Case, EngineSpec
from .host import Lab
from .test_host_buffer import BLOCK_TOKENS, buffered, case, prefilling
from .test_like_pairs import tokens_to_move

pytest.importorskip(
    "torch_xla",
    reason="torch_xla is not installed: run this with the Python that experiments/env_xla.sh makes",
)
pytestmark = pytest.mark.lab

RELEASE = "0.13.0"
PALLAS = {"family": "pallas", "head_dim": 128, "dtype": "bfloat16"}
LATENT = {"family": "mla", "head_dim": 64, "dtype": "bfloat16", "layout": "NHD"}
NHD = {"layout": "NHD"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    fetch([RELEASE])
    with Lab(RELEASE) as opened:
        yield opened


def p(**more: object) -> EngineSpec:
    return replace(prefilling(**more), device=XLA, holds_numbers=True)


def d(**more: object) -> EngineSpec:
    return replace(buffered(**more), device=XLA, holds_numbers=True)


def on_host(spec: EngineSpec) -> EngineSpec:
    return replace(spec, holds_numbers=True)


#: (P, D, tokens that D's own prefix cache holds)
PAIRS: dict[str, tuple[EngineSpec, EngineSpec, int]] = {
    "a TPU's": (p(**PALLAS), d(**PALLAS), 0),
    "P alone": (p(**PALLAS), on_host(buffered(**PALLAS)), 0),
    "D alone": (on_host(prefilling(**PALLAS)), d(**PALLAS), 0),
    "128 to 32, a prefix": (p(block_tokens=128, **PALLAS), d(**PALLAS), 2 * BLOCK_TOKENS),
    "32 to 128": (p(**PALLAS), d(block_tokens=128, **PALLAS), 0),
    "keys first": (p(dtype="float16", **NHD), d(dtype="float16", **NHD), 0),
    "float32": (p(**NHD), d(**NHD), 0),
    "bytes": (p(dtype="fp8", **NHD), d(dtype="fp8", **NHD), 0),
    "latent": (p(**LATENT), d(**LATENT), 0),
}


def of(name: str) -> Case:
    prefill, decode, hit = PAIRS[name]
    return case(name, (prefill, decode), prefix_hit_tokens=hit)


@pytest.mark.parametrize("name", PAIRS)
def test_pair_is_identical(lab: Lab, name: str) -> None:
    lab.run(of(name)).must_be("identical", moved=tokens_to_move(of(name), lab.release))
