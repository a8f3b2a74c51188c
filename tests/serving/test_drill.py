"""What the drill does and counts, with stand-ins for engines (no vLLM)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.errors import BadOptions, EngineFailed, RequestFailed

httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from experiments import drill  # noqa: E402
from experiments.engines import faults, routed, scenes  # noqa: E402
from experiments.engines.routed import (  # noqa: E402
    Asked,
    Outcome,
    Play,
    Prompt,  # noqa: E402
    settled,
)

pytestmark = pytest.mark.serving

_ROW = drill.Row(
    pair="both",
    scene="stale",
    requests=8,
    right=4,
    wrong=0,
    failed_at_p=0,
    failed_at_d=4,
    broken_at_p=0,
    broken_at_d=0,
    no_answer=0,
    failed_after=0,
    restarts_decode=False,
    again_right=4,
    again_wrong=0,
    again_failed=0,
    expired=4,
    counted_at_p=0,
    counted_at_d=4,
    transfers=4,
    ended=[],
    said={},
    seconds=1.0,
)


def _missed(*rows: drill.Row) -> list[str]:
    return [goal.name for goal in drill.goals(rows) if not goal.is_met]


def test_what_must_be_so_of_kvpatch_on_both_sides() -> None:
    assert _missed(_ROW) == []
    assert _missed(replace(_ROW, right=3, wrong=1)) == ["both, stale: wrong answers"]
    assert _missed(replace(_ROW, again_wrong=1)) == ["both, stale: wrong answers"]
    assert _missed(replace(_ROW, right=3, no_answer=1)) == ["both, stale: without an answer"]
    assert _missed(replace(_ROW, again_failed=1)) == ["both, stale: without an answer"]
    assert _missed(replace(_ROW, ended=["D"])) == ["both, stale: engines that ended by themselves"]
    for right in (3, 5):
        assert _missed(replace(_ROW, right=right)) == ["both, stale: requests not told of once"]


def test_an_engine_that_was_not_killed_counts_each_failure_once_and_breaks_no_connection() -> None:
    at_p = ["both, stale: failures that P counted otherwise"]
    at_d = ["both, stale: failures that D counted otherwise"]
    for counted in (3, 5):
        assert _missed(replace(_ROW, counted_at_d=counted)) == at_d
    assert _missed(replace(_ROW, counted_at_p=1)) == at_p
    assert _missed(replace(_ROW, right=3, failed_at_p=1)) == at_p
    # What the engine has counted and its client was not told of does not make up for the other.
    assert _missed(replace(_ROW, failed_at_d=3, broken_at_d=1)) == at_d
    assert _missed(replace(_ROW, right=3, broken_at_d=1, counted_at_d=4)) == at_d
    assert _missed(replace(_ROW, right=3, broken_at_p=1)) == at_p
    killed = replace(_ROW, scene="kill-d", failed_at_d=0, broken_at_d=4, counted_at_d=None)
    assert _missed(killed) == []


def test_a_drill_in_which_stock_is_right_has_shown_nothing() -> None:
    stock = replace(_ROW, pair="stock")
    assert _missed(stock) == ["stock, stale: wrong answers"]
    assert _missed(replace(stock, wrong=1, again_wrong=3, counted_at_d=9)) == []
    assert _missed(replace(stock, scene="link"), replace(_ROW, pair="d-alone", wrong=8)) == []


def test_what_is_chosen_is_in_the_order_of_the_table() -> None:
    names = list(scenes.SCENES)
    assert drill.chosen(None, names, "--scenes") == names
    assert drill.chosen("link, stale", names, "--scenes") == ["stale", "link"]
    with pytest.raises(BadOptions, match="--scenes: expected some of stale"):
        drill.chosen("stale,nothing", names, "--scenes")


@dataclass
class _Pair:
    """Stands in for a pair of engines; a request takes 5 ms, and fails where one is down."""

    prefill: str = "P"
    decode: str = "D"
    is_down: bool = False
    kills: list[str] = field(default_factory=list)
    chance: Any = field(default_factory=lambda: SimpleNamespace(uniform=lambda *_: 0.002))

    async def served(self, prompt: Prompt) -> Outcome:
        await asyncio.sleep(0.005)
        return Outcome(prompt, "failed_at_p" if self.is_down else "right", "gone")

    async def restart(self, engine: str) -> None:
        self.is_down = True
        self.kills.append(engine)
        await asyncio.sleep(0.02)
        self.is_down = False


def _prompts(count: int) -> list[Prompt]:
    return [Prompt((number,), (7,)) for number in range(count)]


@pytest.mark.parametrize(("name", "victim"), [("kill-p", "P"), ("kill-d", "D")])
def test_each_request_around_a_kill_is_told_once(
    name: str, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenes, "_REQUESTS_PER_KILL", 30)
    pair, prompts, told = _Pair(), _prompts(60), list[tuple[Outcome, bool]]()
    play: Any = pair
    asyncio.run(scenes.SCENES[name](play, prompts, lambda *one: told.append(one)))  # type: ignore[arg-type]
    assert pair.kills == [victim, victim]
    assert sorted(outcome.prompt.token_ids for outcome, _ in told) == [p.token_ids for p in prompts]
    failed = [is_after for outcome, is_after in told if outcome.kind != "right"]
    assert 0 < len(failed) <= 2 * routed.TOGETHER and not any(failed)
    assert any(is_after for _, is_after in told)


def test_a_request_that_is_never_answered_is_one_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routed, "PATIENCE_S", 0.05)
    first, second = _prompts(2)

    async def found() -> Sequence[Outcome]:
        async def right() -> Outcome:
            return Outcome(first, "right")

        async def never() -> Outcome:
            await asyncio.sleep(60)
            raise AssertionError

        return await settled(
            [
                Asked(first, asyncio.create_task(right())),
                Asked(second, asyncio.create_task(never())),
            ]
        )

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


def test_what_another_engine_has_counted_is_not_taken_for_the_first_ones() -> None:
    first, killed = drill.Book(7, {"errors": 3}), drill.Book(8, {"errors": 1})
    assert drill.since(first, drill.Book(7, {"errors": 5}), "errors") == 2
    assert drill.since(first, killed, "errors") is None


def test_a_counter_is_the_sum_of_its_samples_with_these_labels() -> None:
    pytest.importorskip("prometheus_client", reason="comes with vLLM")
    text = "\n".join(
        [
            "# HELP vllm:request_success_total how requests have ended",
            "# TYPE vllm:request_success_total counter",
            'vllm:request_success_total{engine="0",finished_reason="error"} 3.0',
            'vllm:request_success_total{engine="1",finished_reason="error"} 4.0',
            'vllm:request_success_total{engine="0",finished_reason="length"} 9.0',
            "",
        ]
    )

    async def counted(name: str, **labels: str) -> int:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
        async with httpx.AsyncClient(transport=transport) as client:
            engine: Any = SimpleNamespace(url="http://d")
            return await faults.count(client, engine, name, **labels)

    assert asyncio.run(counted(faults.ENDED, finished_reason="error")) == 7
    assert asyncio.run(counted(faults.ENDED)) == 16
    assert asyncio.run(counted(faults.EXPIRED)) == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_an_engine_that_is_held_does_not_run_until_it_is_let_go() -> None:
    child = subprocess.Popen(["sleep", "60"], preexec_fn=os.setpgrp)
    engine: Any = SimpleNamespace(group=child.pid, spec=SimpleNamespace(name="D"))
    try:
        with pytest.raises(RequestFailed), faults.held(engine):
            end = time.monotonic() + 5
            while _state(child.pid) != "T" and time.monotonic() < end:
                time.sleep(0.01)
            assert _state(child.pid) == "T"
            raise RequestFailed("whatever happens inside", "look into its log")
        end = time.monotonic() + 5
        while _state(child.pid) == "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert _state(child.pid) != "T"
    finally:
        child.kill()
        child.wait()
    with pytest.raises(EngineFailed, match="D has no process left"), faults.held(engine):
        pass
