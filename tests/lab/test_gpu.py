"""Real connectors whose caches lie in a GPU's memory; without one, in memory that is as far away.

The second is for the lab alone: that it copies all that it must from and to such memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpatch.core.releases import RELEASES
from kvpatch.patches import SLUGS
from tests.on_gpu import GPU
from tests.releases.fetch import fetch

from . import far_memory
from .case import Case, EngineSpec
from .host import Lab
from .releases import is_full
from .test_host_buffer import buffered, prefilling

pytestmark = pytest.mark.lab


def _pair(prefill: dict[str, object], decode: dict[str, object]) -> Case:
    sides = (EngineSpec(**{"planned_blocks": 64, **side}) for side in (prefill, decode))  # type: ignore[arg-type]
    return Case("on a device", *sides, prompt_tokens=300, n_requests=2)


MLA = {"family": "mla", "head_dim": 576}
#: Those that stock serves by itself, and those that it cannot.
LIKE = {
    "16": _pair({}, {}),
    "64": _pair({"block_tokens": 64}, {"block_tokens": 64}),
    "latent, 64": _pair({"block_tokens": 64, **MLA}, {"block_tokens": 64, **MLA}),
}
UNLIKE = {
    "128 to 32": _pair({"block_tokens": 128}, {"block_tokens": 32}),
    "32 to 128": _pair({"block_tokens": 32}, {"block_tokens": 128}),
    "96 to 64": _pair({"block_tokens": 96}, {"block_tokens": 64}),
    "NHD to HND": _pair({"layout": "NHD"}, {}),
    "NHD 128 to HND 32": _pair({"layout": "NHD", "block_tokens": 128}, {"block_tokens": 32}),
    "latent, 128 to 32": _pair({"block_tokens": 128, **MLA}, {"block_tokens": 32, **MLA}),
}
BUFFERED = {
    "host buffers": Case("buffered", prefilling(), buffered(), prompt_tokens=100),
    "host buffers, 128 to 32": Case(
        "buffered", prefilling(block_tokens=128), buffered(), prompt_tokens=100
    ),
}
PAIRS = {**LIKE, **UNLIKE, **BUFFERED}


#: The copy shows that the lab copies all it must; it is played in full runs.
MEMORIES = [*([far_memory.COPY] * is_full()), pytest.param(far_memory.GPU, marks=GPU)]


# With the release in its name, so that one process plays all of them.
@pytest.fixture(scope="module", params=MEMORIES, ids=lambda memory: f"{memory}-{RELEASES[-1]}")
def far(request: pytest.FixtureRequest) -> Iterator[Lab]:
    release = RELEASES[-1]
    fetch([release])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(far_memory.MEMORY, request.param)
        with Lab(release) as lab:
            yield lab


@pytest.mark.parametrize("name", PAIRS)
def test_pair_is_identical(far: Lab, name: str) -> None:
    far.run(PAIRS[name] if name in BUFFERED else PAIRS[name].patched(*SLUGS)).must_be("identical")


@pytest.mark.parametrize("transfer", ["direct", "staged"])
def test_both_ways_are_identical(far: Lab, transfer: str) -> None:
    case = _pair({"block_tokens": 128}, {"settings": (("KVPATCH_TRANSFER", transfer),)})

    far.run(case.patched(*SLUGS)).must_be("identical")


@pytest.mark.parametrize("name", LIKE)
def test_stock_serves_like_pairs(far: Lab, name: str) -> None:
    far.run(LIKE[name].stock()).must_be("identical")
