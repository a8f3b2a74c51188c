"""What counts as a difference, and what is said about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.engines.report import prefix_hit_blocks, prefix_pairs
from kvpatch.tools.verify.compare import (
    Observation,
    SetupComparison,
    Snapshot,
    compare,
    errors,
    json_lines,
    sentences,
    write_json_lines,
)
from kvpatch.tools.verify.handoff import Completion
from kvpatch.tools.verify.model import Case, build_cases, steps

pytestmark = pytest.mark.serving

_BLOCK_TOKENS = (16, 32, 48, 64, 96, 128)
_CASE = Case("one", tuple(range(10)), step=0)
_CONTROL = Case("control-10", tuple(range(10)), step=1, control=True)
_CACHE = Snapshot({"layer.0": "aa", "layer.1": "bb"}, computed_tokens=9)
_GOOD = Observation(Completion((1, 2, 3), "abc"), prefill=_CACHE, decode=_CACHE)
_BAD = Observation(
    Completion((1, 9, 3), "axc"),
    prefill=_CACHE,
    decode=replace(_CACHE, fingerprints={"layer.0": "aa", "layer.1": "cc"}),
)


def _compare(observed: Observation, control: Observation = _BAD) -> SetupComparison:
    reference = {_CASE.name: replace(_GOOD, decode=None), _CONTROL.name: _GOOD}
    return compare(
        (_CASE, _CONTROL),
        {"single": reference, "stock": {_CASE.name: observed, _CONTROL.name: control}},
    )


@pytest.mark.parametrize(
    ("observed", "where", "problem"),
    [
        (replace(_GOOD, completion=Completion((1, 2, 4), "abd")), "tokens", "differs at token 2"),
        (replace(_GOOD, completion=Completion((1, 2), "ab")), "tokens", "differs at token 2"),
        (replace(_GOOD, completion=Completion((1, 2, 3), "ab?")), "tokens", "other text"),
        (replace(_GOOD, completion=None, error="HTTP 500"), "tokens", "failed"),
        (replace(_GOOD, decode=_BAD.decode), "transfer", "1 of 2 layers differ"),
        (
            replace(_GOOD, decode=Snapshot({"layer.0": "aa", "layer.2": "bb"}, 9)),
            "transfer",
            "2 of 3 layers differ",
        ),
        (replace(_GOOD, decode=None), "transfer", "decode engine reported no cache"),
        (replace(_GOOD, prefill=None), "transfer", "prefill engine reported no cache"),
        (replace(_GOOD, prefill=_BAD.decode, decode=_BAD.decode), "prefill", "1 of 2 layers"),
        (
            replace(_GOOD, decode=replace(_CACHE, computed_tokens=0)),
            "transfer",
            "had 0 of 10 tokens and computed the rest",
        ),
    ],
)
def test_each_difference_fails(observed: Observation, where: str, problem: str) -> None:
    comparison = _compare(observed)
    assert problem in getattr(comparison.verdicts["stock"]["one"], where)
    assert list(comparison.differences) == ["stock/one"]
    assert not comparison.passed


@pytest.mark.parametrize(
    "unnoticed",
    [
        _GOOD,
        replace(_GOOD, decode=_BAD.decode),
        replace(_GOOD, completion=_BAD.completion),
        replace(_BAD, completion=None, error="HTTP 500"),
    ],
)
def test_a_control_that_nobody_notices_fails(unnoticed: Observation) -> None:
    comparison = _compare(_GOOD, control=unnoticed)
    assert comparison.control_failures == ["stock/control-10"]
    assert not comparison.passed
    assert "NOT NOTICED" in sentences(comparison)[-1]


def test_nothing_compared_is_no_success() -> None:
    comparison = compare((_CASE,), {"single": {_CASE.name: _GOOD}})
    assert not comparison.passed
    assert sentences(comparison)[0] == "nothing was compared"


_ROUNDED = Snapshot({"layer.0": "ax", "layer.1": "bx"}, computed_tokens=9)
_ROUNDED_BOTH = replace(_GOOD, prefill=_ROUNDED, decode=_ROUNDED)


@pytest.mark.parametrize(
    ("observed", "differences"),
    [(_ROUNDED_BOTH, []), (replace(_ROUNDED_BOTH, decode=_CACHE), ["stock/one"])],
)
def test_what_computes_otherwise_may_round_differently(
    observed: Observation, differences: list[str]
) -> None:
    """Prompts in one batch, or a prefill engine of two ranks; the transfer must be exact."""
    cases = (_CASE, replace(_CASE, name="two"))
    reference = dict.fromkeys(("one", "two"), _GOOD)
    batched = compare(cases, {"single": reference, "stock": {"one": observed, "two": _GOOD}})
    assert list(batched.differences) == differences
    alone = {"single": {"one": _GOOD}, "stock": {"one": observed}}
    assert list(compare((_CASE,), alone, same_prefill=False).differences) == differences
    assert list(compare((_CASE,), alone).differences) == ["stock/one"]


def test_prefixes_of_other_lengths_may_round_differently() -> None:
    other = replace(_CACHE, fingerprints={"layer.0": "ax", "layer.1": "bx"})
    hit = replace(other, computed_tokens=4)
    assert _compare(replace(_GOOD, prefill=hit, decode=other)).passed
    assert not _compare(replace(_GOOD, prefill=other, decode=other)).passed
    assert not _compare(replace(_GOOD, prefill=hit)).passed


@pytest.mark.parametrize(
    ("earlier", "later", "blocks"),
    [
        (((5, 6, 7),), ((5, 6, 8),), 2),
        (((5, 6),), ((4, 6),), 0),
        # A window's first blocks are placeholders, which are no hit.
        (((0, 0, 7), (5, 6)), ((0, 0, 8), (5, 9)), 1),
        ((), (), 0),
    ],
)
def test_prefix_hits(
    earlier: tuple[tuple[int, ...], ...], later: tuple[tuple[int, ...], ...], blocks: int
) -> None:
    first, second = (replace(_CACHE, block_ids=ids) for ids in (earlier, later))
    assert prefix_hit_blocks(first, second) == blocks


def test_prompts_are_what_the_run_promises() -> None:
    cases = build_cases(range(2, 400))
    ordinary = [case for case in cases if not case.control]
    assert cases == build_cases(range(2, 400))
    assert len({case.tokens for case in ordinary}) >= 8
    assert min(case.tokens for case in ordinary) == 1
    assert all(case.tokens % size for case in ordinary for size in _BLOCK_TOKENS)
    assert max(len(step) for step in steps(cases)) == 8
    pairs = prefix_pairs(cases)
    for (a, b), shared in zip(pairs, (35, 67, 131), strict=True):
        assert a.step < b.step
        assert a.token_ids[:shared] == b.token_ids[:shared]
        assert a.token_ids[: shared + 9] != b.token_ids[: shared + 9]
    hits = {size: [35 // size, 67 // size, 131 // size] for size in (32, 64, 96, 128)}
    assert all(1 in blocks for blocks in hits.values()), "a hit of one block for every size"
    assert all(case.tokens > 1 for case in cases if case.control)
    with pytest.raises(ValueError, match="found 3"):
        build_cases([4, 5, 6])


def test_report(tmp_path: Path) -> None:
    failed = replace(_GOOD, completion=None, error="HTTP 500: no")
    reference = {_CASE.name: replace(_GOOD, decode=None), _CONTROL.name: _GOOD}
    observations = {
        "single": reference,
        "stock": {_CASE.name: failed, _CONTROL.name: _BAD},
        "kvpatch": {_CASE.name: _GOOD, _CONTROL.name: _BAD},
    }
    cases = (_CASE, _CONTROL)
    comparison = compare(cases, observations)
    spoiled = compare((_CASE,), {"single": reference, "kvpatch": {_CASE.name: _BAD}})
    assert sentences(spoiled)[0] == (
        "kvpatch/one: tokens: differs at token 1; transfer: 1 of 2 layers differ"
    )
    assert sentences(comparison) == [
        "stock/one: HTTP 500: no",
        "stock/one: tokens: failed; transfer: no transfer",
        "1 of 2 differ: stock/one",
        "negative control: differs (as it must), 2 of 2",
    ]
    assert errors(comparison) == ["stock/one: HTTP 500: no"]

    path = tmp_path / "lines.jsonl"
    write_json_lines(path, json_lines(comparison))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["case"] == "one" and first["prompt_tokens"] == 10
    assert first["setups"]["kvpatch"]["decode"]["fingerprints"] == _CACHE.fingerprints
    assert first["setups"]["kvpatch"]["verdict"]["identical"] is True
    assert first["setups"]["stock"]["verdict"]["identical"] is False
    assert first["setups"]["single"]["verdict"] is None
    assert second["control"] is True
