"""What a rolling upgrade plays and counts, with stand-ins for engines (no vLLM)."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.errors import BadOptions

pytest.importorskip("httpx", reason="httpx is not installed")

from experiments import rolling_upgrade  # noqa: E402
from experiments.engines.references import Prompt  # noqa: E402
from experiments.engines.routed import Outcome  # noqa: E402
from experiments.rolling_upgrade import Books, Fleet, Phase, Run  # noqa: E402

pytestmark = pytest.mark.serving

_PROMPT = Prompt((1, 2), (3,))
_RUN = Run("1.0", "2.0", "P first", "beside", True, "model")
_PHASE = Phase(
    engines="kvpatch on D",
    old="1.0",
    new="2.0",
    order="P first",
    way="beside",
    between="1.0 → 1.0",
    requests=8,
    right=8,
    wrong=0,
    failed_at_p=0,
    failed_at_d=0,
    broken_at_p=0,
    broken_at_d=0,
    no_answer=0,
    said={},
    reads=8,
)


def _missed(*rows: Phase) -> list[str]:
    return [goal.name for goal in rolling_upgrade.goals(rows) if not goal.is_met]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"wrong": 1}, ["P first, beside, 1.0 → 1.0: wrong answers"]),
        ({"no_answer": 1}, ["P first, beside, 1.0 → 1.0: without an answer"]),
        ({"failed_at_d": 1}, ["P first, beside, 1.0 → 1.0: failures"]),
        ({"reads": 7}, ["P first, beside: reads for 8 answers"]),
        ({"way": "killed", "between": "P is replaced, 1.0 → 1.0", "broken_at_p": 8}, []),
    ],
)
def test_what_must_be_so_with_kvpatch(changes: dict[str, Any], missed: list[str]) -> None:
    assert _missed(replace(_PHASE, **changes)) == missed


def test_a_stock_fleet_that_takes_no_harm_has_tried_nothing() -> None:
    unharmed = replace(_PHASE, engines="stock")

    assert _missed(unharmed) == ["stock: wrong or failed at D"]
    assert _missed(replace(unharmed, failed_at_d=1)) == []


@dataclass
class _Engine:
    """An engine that is ready at once and notes what is done to it."""

    spec: Any
    log: Path
    done: list[str]

    def start(self) -> None:
        self.done.append(f"start {self.spec.name}")

    async def ready(self, client: object, timeout_s: float) -> None:
        await asyncio.sleep(0.05)

    def stop(self) -> None:
        self.done.append(f"stop {self.spec.name}")


class _Play:
    """Answers rightly, but between a P of 2.0 and a D of 1.0; says what was sent where."""

    def __init__(self, prefill: _Engine, decode: _Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self.client = None
        self.options = SimpleNamespace(work_dir=Path(), startup_timeout_s=1.0)

    async def served(self, prompt: Prompt) -> Outcome:
        names = (self.prefill.spec.name, self.decode.spec.name)
        await asyncio.sleep(0.01)
        refused = names[0].endswith("2.0") and names[1].endswith("1.0")
        return Outcome(prompt, "failed_at_d" if refused else "right", "refused" if refused else "")


@pytest.mark.parametrize("way", rolling_upgrade.WAYS)
@pytest.mark.parametrize("order", rolling_upgrade.ORDERS)
def test_phases_of_an_upgrade(order: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    run = replace(_RUN, order=order, way=way)
    monkeypatch.setattr(rolling_upgrade, "python_of", lambda release: "")
    monkeypatch.setattr(rolling_upgrade, "Engine", lambda spec, log: _Engine(spec, log, done))
    monkeypatch.setattr(rolling_upgrade, "_PAUSE_S", 0.01)

    async def kill(engine: _Engine) -> None:
        done.append(f"kill {engine.spec.name}")

    async def count(client: object, engine: _Engine, name: str) -> int:
        return 5

    monkeypatch.setattr(rolling_upgrade, "kill", kill)
    monkeypatch.setattr(rolling_upgrade, "count", count)
    engines = [_Engine(run.spec(side, "1.0"), Path(), done) for side in "PD"]
    fleet = Fleet(run, _Play(*engines), Books(), itertools.repeat(_PROMPT), each=16)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(fleet.upgrade(), 30))

    rows = rolling_upgrade.phases(fleet)
    first, second = ("P", "D") if order == "P first" else ("D", "P")
    between = "2.0 → 1.0" if order == "P first" else "1.0 → 2.0"
    assert [row.between for row in rows] == [
        "1.0 → 1.0",
        f"{first} is replaced, 1.0 → 1.0",
        between,
        f"{second} is replaced, {between}",
        "2.0 → 2.0",
    ]
    assert all(row.requests >= 16 for row in rows if "replaced" not in row.between)
    assert all(row.requests == row.right + row.failed_at_d for row in rows)
    # What a phase begins with was sent in the one before: only what lies apart is all of one kind.
    assert rows[0].failed_at_d == 0
    assert (rows[2].failed_at_d > 0) == (order == "P first")
    assert rows[-1].reads == 10  # of both D's
    ended = "kill" if way == "killed" else "stop"
    names = [engine.spec.name for engine in (engines if first == "P" else reversed(engines))]
    assert [one for one in done if one.startswith(ended)] == [f"{ended} {name}" for name in names]
    if way == "beside":  # the old one serves until the new one is there
        assert done[0].startswith("start")
    else:
        assert done[0].startswith("kill")


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(BadOptions, match="--ways: expected some of beside, killed, found 'none'"):
        rolling_upgrade.chosen("none", rolling_upgrade.WAYS, "--ways")
