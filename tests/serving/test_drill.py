"""What the drill and a rolling upgrade do and count, with stand-ins for engines (no vLLM)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from experiments import drill, rolling_upgrade  # noqa: E402
from experiments.engines import routed  # noqa: E402
from experiments.engines.routed import KINDS, Asked, Outcome, Play, Prompt, settled  # noqa: E402
from experiments.rolling_upgrade import Phase  # noqa: E402

pytestmark = pytest.mark.serving

_NONE = dict.fromkeys(KINDS[1:], 0)
_AGAIN = {"again_right": 4, "again_wrong": 0, "again_failed": 0}
_ROW = drill.Row(
    pair="both", scene="stale", requests=8, right=4, **_NONE | {"failed_at_d": 4}, **_AGAIN,
    counted_at_p=0, counted_at_d=4, ended=[], said={},
)  # fmt: skip
_PHASE = Phase(
    engines="kvpatch on D", old="1.0", new="2.0", order="P first", way="beside",
    between="1.0 → 1.0", requests=8, right=8, **_NONE, said={}, reads=8,
)  # fmt: skip


def _missed(*rows: drill.Row | Phase) -> list[str]:
    goals = drill.goals if isinstance(rows[0], drill.Row) else rolling_upgrade.goals
    return [goal.name for goal in goals(rows) if not goal.is_met]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"right": 3, "wrong": 1}, ["both, stale: wrong answers"]),
        ({"again_wrong": 1}, ["both, stale: wrong answers"]),
        ({"right": 3, "no_answer": 1}, ["both, stale: without an answer"]),
        ({"again_failed": 1}, ["both, stale: without an answer"]),
        ({"ended": ["D"]}, ["both, stale: engines that ended by themselves"]),
        ({"right": 3}, ["both, stale: requests not told of once"]),
        ({"right": 5}, ["both, stale: requests not told of once"]),
    ],
)
def test_what_must_be_so_of_kvpatch_on_both_sides(
    changes: dict[str, Any], missed: list[str]
) -> None:
    assert _missed(replace(_ROW, **changes)) == missed


def test_a_drill_in_which_stock_is_right_has_shown_nothing() -> None:
    stock = replace(_ROW, pair="stock")
    assert _missed(stock) == ["stock, stale: wrong answers"]
    assert _missed(replace(stock, wrong=1, again_wrong=3, counted_at_d=9)) == []
    assert _missed(replace(stock, scene="link"), replace(_ROW, pair="d-alone", wrong=8)) == []


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"wrong": 1}, ["P first, beside, 1.0 → 1.0: wrong answers"]),
        ({"no_answer": 1}, ["P first, beside, 1.0 → 1.0: without an answer"]),
        ({"failed_at_d": 1}, ["P first, beside, 1.0 → 1.0: failures"]),
        ({"reads": 7}, ["P first, beside: reads for 8 answers"]),
        ({"way": "killed", "between": "P is replaced, 1.0 → 1.0", "broken_at_p": 8}, []),
        # A stock fleet that takes no harm has tried nothing.
        ({"engines": "stock"}, ["stock: wrong or failed at D"]),
        ({"engines": "stock", "failed_at_d": 1}, []),
    ],
)
def test_what_must_be_so_of_a_rolling_upgrade(changes: dict[str, Any], missed: list[str]) -> None:
    assert _missed(replace(_PHASE, **changes)) == missed


def test_a_request_that_is_never_answered_is_one_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routed, "PATIENCE_S", 0.05)
    first, second = (Prompt((number,), (7,)) for number in range(2))

    async def found() -> Sequence[Outcome]:
        async def right() -> Outcome:
            return Outcome(first, "right")

        async def never() -> Outcome:
            await asyncio.sleep(60)
            raise AssertionError

        asked = ((first, right()), (second, never()))
        return await settled([Asked(one, asyncio.create_task(work)) for one, work in asked])

    assert asyncio.run(found()) == [Outcome(first, "right"), Outcome(second, "no_answer")]


@pytest.mark.parametrize(
    ("status", "tokens", "expected"),
    [
        ((200, 200), (7, 8), ("right", "")),
        ((200, 200), (7, 9), ("wrong", "")),
        ((503, 200), (7, 8), ("failed_at_p", "HTTP 503: no")),
        ((200, 500), (7, 8), ("failed_at_d", "HTTP 500: no")),
        # A connection that ends without a word is no failure that was told.
        ((0, 200), (7, 8), ("broken_at_p", "ReadError")),
        ((200, 0), (7, 8), ("broken_at_d", "ReadError")),
    ],
)
def test_an_answer_is_judged_by_status_and_tokens(
    status: tuple[int, int], tokens: tuple[int, ...], expected: tuple[str, str], tmp_path: Path
) -> None:
    def answer(request: Any) -> Any:
        at_p = request.url.host == "p"
        if (code := status[0 if at_p else 1]) == 0:
            raise httpx.ReadError("", request=request)
        if code != 200:
            return httpx.Response(code, text="no")
        if at_p:
            return httpx.Response(200, json={"kv_transfer_params": {"remote_port": 7}})
        event = f'data: {{"choices": [{{"token_ids": {list(tokens)}, "text": ""}}]}}'
        return httpx.Response(200, text=f"{event}\n\ndata: [DONE]\n\n")

    def engine(host: str) -> Any:
        return SimpleNamespace(url=f"http://{host}", spec=SimpleNamespace(model="model"))

    async def served() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            options: Any = SimpleNamespace(work_dir=tmp_path)
            play = Play(client, options, engine("p"), engine("d"), (1, 2))
            return await play.served(Prompt((1, 2, 3), (7, 8)))

    found = asyncio.run(served())
    assert (found.kind, found.said) == expected
