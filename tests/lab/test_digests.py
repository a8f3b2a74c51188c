"""Digests of real caches, as releases lay them out: P's, and D's of what a real read has brought.

What makes and compares them in an engine is test_load_digests.py's: here it is cell by cell.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from kvpatch.checks.digests.digests import Comparison, compare
from kvpatch.patches import SLUGS
from tests.geometry.slow_digests import of_all_ranks

from .case import EngineSpec
from .engine_api import Prompt
from .host import Lab
from .releases import has_named_layouts, has_tpus, states_layout
from .stage import Actor, Stage
from .test_several_peers import introduce

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

TOKENS = 150


def spec(
    family: str = "flash", layout: str = "HND", tokens: int = 32, **more: object
) -> EngineSpec:
    sizes = {"kv_heads": 4, "head_dim": 32, "planned_blocks": 40, **more}
    return EngineSpec(family, layout, block_tokens=tokens, **sizes)  # type: ignore[arg-type]


#: P, D, and the first release that has such caches.
PAIRS = {
    "layouts and blocks": (spec(), spec("flash", "NHD", 48), "0.10.1"),
    "ranks": (spec(tp_size=2), spec(tp_size=1, tokens=64), "0.10.1"),
    "more ranks than heads": (spec(kv_heads=2, tp_size=4), spec(kv_heads=2), "0.10.1"),
    "fp8": (spec(dtype="fp8"), spec("flash", "NHD", 64, dtype="fp8"), "0.10.1"),
    "MLA": (
        spec("mla", head_dim=64, kv_heads=1),
        spec("mla", tokens=16, head_dim=64, kv_heads=1),
        "0.10.1",
    ),
    "heads by turns": (
        spec("pallas", head_dim=128),
        spec("pallas", tokens=64, head_dim=128),
        "0.10.1",
    ),
    "indexers": (
        spec("mla", "NHD", 64, head_dim=64, kv_heads=1, layers=4, has_indexer=True),
        spec("mla", "NHD", 64, head_dim=64, kv_heads=1, layers=4, has_indexer=True),
        "0.11",
    ),
    "cross-layer blocks": (spec(layout="BLHNC"), spec(layout="LHBNC", tokens=64), "0.29"),
}


def _is_there(name: str, lab: Lab) -> bool:
    """Whether the release has such caches, and a D that may read them."""
    needs = {
        "heads by turns": has_tpus,
        "cross-layer blocks": has_named_layouts,
    }
    is_old = Version(lab.release) < Version(PAIRS[name][2])
    return not is_old and needs.get(name, states_layout)(lab.release)


def _pair(stage: Stage, name: str) -> tuple[Actor, Actor]:
    prefill, decode, _ = PAIRS[name]
    p = stage.start(replace(prefill, patched=True, patches=SLUGS))
    d = stage.decode(decode)
    introduce(d, [stage.prompt(TOKENS)], p)
    return p, d


def _compared(
    prefill: Actor, decode: Actor, theirs: object, prompt: Prompt, tokens: int
) -> list[Comparison]:
    """Each rank of D's with all of P's."""
    ours = decode.call("digests", prompt.name, tokens)
    return [
        compare(of_all_ranks(kinds), of_kind)
        for rank in ours
        for kinds, of_kind in zip(zip(*theirs, strict=True), rank, strict=True)  # type: ignore[misc,arg-type]
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_what_was_read_has_the_digest_of_what_was_sent(lab: Lab, name: str) -> None:
    if not _is_there(name, lab):
        pytest.skip("this release has no such caches")
    with Stage(lab) as stage:
        p, d = _pair(stage, name)
        prompt = stage.prompt(TOKENS)
        (ask,) = p.compute(prompt)
        tokens = d.ask(ask)
        theirs = p.call("digests", prompt.name, tokens)

        assert d.watch(prompt).received == {prompt.name}
        found = _compared(p, d, theirs, prompt, tokens)

        assert tokens > 0
        assert found and all(one.proves for one in found), found


@pytest.mark.parametrize("name", PAIRS)
def test_what_p_has_given_away_is_noticed(lab: Lab, name: str) -> None:
    """P's blocks are another request's by the time that D reads them: each cell says so."""
    if not _is_there(name, lab):
        pytest.skip("this release has no such caches")
    with Stage(lab) as stage:
        p, d = _pair(stage, name)
        prompt = stage.prompt(TOKENS)
        (ask,) = p.compute(prompt)
        theirs = p.call("digests", prompt.name, TOKENS - 1)
        p.call("hand_on", prompt.name)
        tokens = d.ask(ask)

        assert d.watch(prompt).received == {prompt.name}
        found = _compared(p, d, theirs, prompt, min(tokens, TOKENS - 1))

        assert tokens > 0
        for one in found:
            assert sum(len(place.heads) for place in one.wrong) > 0, one
            # Where a block moves whole, ranges inside it have nothing of their own.
            assert min(place.first_token for place in one.wrong) == 0
            assert not one.proves
