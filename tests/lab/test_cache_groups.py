"""Several cache groups: full attention beside sliding windows, over shared tensors."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kvpatch.patches import SLUGS

from .case import Case, EngineSpec
from .host import Lab
from .release import HYBRID_MODEL_TOKENS

pytestmark = pytest.mark.lab

WINDOW = 64
#: Layers by turns: Gemma's two kinds alternating, and a group more of windows.
MODELS = {"two groups": ((0, WINDOW), 4), "three groups": ((0, WINDOW, WINDOW), 6)}
BLOCK_TOKENS = {"like": (32, 32), "larger": (32, 64), "smaller": (64, 32), "no multiple": (96, 64)}
PROMPTS = (1, 40, 64, 65, 100, 159, 300)


@pytest.fixture(autouse=True)
def _release_has_groups(lab: Lab) -> None:
    if Version(lab.release) < Version("0.18"):
        pytest.skip("this release's connector takes one cache group: it lacks SupportsHMA")


def engine(model: str, block_tokens: int, **more: object) -> EngineSpec:
    windows, layers = MODELS[model]
    # Room for the longest request in every group, as the release demands, and more.
    blocks = (len(windows) + 1) * (HYBRID_MODEL_TOKENS // block_tokens + 2)
    return EngineSpec(
        block_tokens=block_tokens,
        planned_blocks=blocks,
        layers=layers,
        window_tokens=windows,
        kv_heads=2,
        head_dim=16,
        **more,  # type: ignore[arg-type]
    )


def _case(model: str, sizes: str, prompt: int, hit: str, **prefill: object) -> Case:
    p, d = BLOCK_TOKENS[sizes]
    full = (prompt - 1) // d  # one token at least is left to compute
    hits = {"none": 0, "one block": min(1, full), "all but one": max(0, full - 1)}
    return Case(
        f"{model}, {sizes}, {prompt} tokens, {hit} cached",
        engine(model, p, **prefill),
        engine(model, d),
        prompt,
        hits[hit] * d,
    )


@pytest.mark.parametrize("hit", ["none", "one block", "all but one"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sizes", BLOCK_TOKENS)
@pytest.mark.parametrize("model", MODELS)
def test_groups_are_identical(lab: Lab, model: str, sizes: str, prompt: int, hit: str) -> None:
    case = _case(model, sizes, prompt, hit)

    report = lab.run(case.patched(*SLUGS, prefill=False))

    assert report.outcome == "identical", report
    assert report.moved_tokens == prompt - case.prefix_hit_tokens
