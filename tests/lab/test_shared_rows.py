"""Qwen4's caches: attention, a ring, a summary, gated delta nets and a state that ranks have whole.

Such a block is a row in which the pages of each group's layers begin anew, and the release copies
rows by regions of all groups. kvpatch, on D, leaves to it what it gets right, and refuses the rest.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from packaging.version import Version

from .case import Case, EngineSpec, Outcome, Report
from .host import Lab
from .selection import some_of

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(since="0.29")]

_PROMPT_TOKENS = 300
_ENGINE = EngineSpec(
    "flash", "BLHNC", block_tokens=64, planned_blocks=40, kv_heads=1, has_own_tables=True
)
#: As the model makes them: what looks for keys before the attention itself.
_QSA = ("ring", "summary", "")
_LINEAR = ("linear",) * 3
_MODELS = {
    "attention": _QSA * 2,
    "one attention layer": (*_LINEAR, *_QSA),
    "delta nets": (*_LINEAR, *_QSA) * 2,
    "whole state": ("linear", "ple", "linear", "linear", *_QSA, *_LINEAR, *_QSA),
    "whole state first": ("ple", *_LINEAR, *_QSA, *_LINEAR, *_QSA),
}
_OVERLAY = "this vLLM copies a rank's share of one over another"
_SHORT = "bytes in a block, and this vLLM copies"
_HEADS_ON_EACH, _HEADS_SHARED_OUT = 1, 4


def _case(name: str, ranks: tuple[int, int], heads: int = _HEADS_ON_EACH) -> Case:
    kinds = _MODELS[name]
    engine = replace(_ENGINE, kinds=kinds, layers=len(kinds), kv_heads=heads)
    p, d = (replace(engine, tp_size=size) for size in ranks)
    return Case(f"{name} of {heads} heads, TP{ranks[0]} to TP{ranks[1]}", p, d, _PROMPT_TOKENS)


def _sides(case: Case) -> tuple[EngineSpec, EngineSpec]:
    return case.prefill, case.decode


def _expect_like_stock(lab: Lab, case: Case) -> tuple[Report, Report]:
    """What is right without kvpatch stays right, and all else is refused."""
    stock, ours = lab.run(case.stock()), lab.on_d(case)
    right: Outcome = "identical" if stock.outcome == "identical" else "refused"
    assert ours.outcome == right, (stock, ours)
    if right == "identical":
        assert ours.moved_tokens >= _PROMPT_TOKENS - 1
    return stock, ours


_ROWS = [
    *some_of(_MODELS, [(1, 1), (2, 2)], [_HEADS_ON_EACH, _HEADS_SHARED_OUT]),
    *itertools.product(_MODELS, [(1, 2), (2, 1)], [_HEADS_ON_EACH, _HEADS_SHARED_OUT]),
    # P has a head on each rank, or each of two heads on two of four.
    *itertools.product(["whole state"], [(2, 4), (4, 2)], [2]),
]


@pytest.mark.parametrize(("name", "ranks", "heads"), _ROWS, ids=str)
def test_what_stock_reads_rightly_stays_right(
    lab: Lab, name: str, ranks: tuple[int, int], heads: int
) -> None:
    """Where ranks have heads of their own rows are unlike, and right of one attention layer alone.

    0.30 and 0.31 copy as much of a whole state as a summary's page has, which is smaller.
    """
    release, has_whole = Version(lab.release), "whole" in name
    if release < Version("0.30") and not has_whole:
        pytest.skip("this release takes no such model without a whole state")
    is_short = has_whole and Version("0.30") <= release < Version("0.32")
    is_shared_out = heads == _HEADS_SHARED_OUT and ranks[0] != ranks[1]

    stock, ours = _expect_like_stock(lab, _case(name, ranks, heads))

    if is_shared_out:
        assert (stock.outcome == "identical") is (name == "one attention layer"), stock
        if name == "delta nets":
            stock.must_be("corrupt")
            assert _OVERLAY in ours.detail
    elif (name, ranks, heads) == ("attention", (2, 1), _HEADS_ON_EACH):
        stock.must_be("refused")  # as it does for any model of heads alone
    else:
        stock.must_be("corrupt" if is_short else "identical")
    if ranks[0] == ranks[1]:
        assert (_SHORT in ours.detail) is is_short


@pytest.mark.on(since="0.30")
def test_a_ring_longer_than_a_summary(lab: Lab) -> None:
    """A summary's page has fewer rows in blocks of fewer tokens, a ring has not."""
    case = _case("delta nets", (1, 1))
    p, d = (replace(e, block_tokens=16, planned_blocks=90) for e in (case.prefill, case.decode))

    stock, ours = _expect_like_stock(lab, replace(case, prefill=p, decode=d))

    stock.must_be("corrupt")
    assert _SHORT in ours.detail
    assert "larger --block-size" in ours.detail


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
def test_other_blocks(lab: Lab, ranks: tuple[int, int]) -> None:
    case = _case("whole state", ranks)
    twice = replace(case.prefill, block_tokens=128)

    lab.on_d(replace(case, prefill=twice)).must_be("refused", "move whole: use one block size")


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["mamba2", "mamba2, one group"])
def test_states_inside_blocks(lab: Lab, kind: str, ranks: tuple[int, int]) -> None:
    """A model without a ring whose states lie in rows too: a group for all heads is misread."""
    engine = EngineSpec(
        layout="BLHNC",
        block_tokens=32,
        planned_blocks=48,
        layers=4,
        has_state=True,
        state_kind=kind,
    )
    p, d = (replace(engine, tp_size=size) for size in ranks)

    stock, ours = _expect_like_stock(lab, Case(f"{kind} {ranks}", p, d, _PROMPT_TOKENS))

    stock.must_be("corrupt" if kind == "mamba2, one group" else "identical")
    if stock.outcome == "corrupt":
        assert "every rank has whole" in ours.detail


@pytest.mark.on(since="0.30")
@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("slots", [(8, 16), (16, 8)], ids=str)
def test_rings_of_unlike_lengths(lab: Lab, slots: tuple[int, int], says: bool) -> None:
    """P and D draft unlike numbers of tokens: no handshake says it, but P's kvpatch does.

    Of several such layers the pages do not fit; of one they do, and are read for what they are not:
    a token is in another slot of each. The lab fills all slots, and sees it where D has more.
    """
    name = "one attention layer"
    case = _case(name, (1, 1))
    p, d = (replace(s, ring_tokens=n) for s, n in zip(_sides(case), slots, strict=True))
    case = replace(case, prefill=p, decode=d)

    report = lab.run(case.patched(prefill=says))

    seen = "corrupt" if slots[0] < slots[1] else "identical"
    assert lab.run(case.stock()).outcome == seen
    if says:
        report.must_be("refused", f"a ring of {slots[1]} here", "have them draft as many tokens")
    else:
        assert report.outcome == seen, "docs/reference/limits.md"
    like = replace(case, prefill=d)
    lab.run(like.patched()).must_be("identical")
