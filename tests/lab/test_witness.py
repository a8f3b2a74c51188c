"""Loads whose bytes are wrong: which of them D's own last token speaks against.

P and D run a small model, so that what D computes of a prompt's last token depends on what it has
loaded of the rest. D's kernels differ from P's by a part in a thousand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvpatch.connector.witness.calibration import CALIBRATION_LOADS
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.core.settings import WITNESS

from .case import EngineSpec
from .engine_api import Prompt
from .host import Lab
from .releases import moves_full_blocks_only
from .stage import Actor, Stage

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation]

TOKENS = 92
SPEC = EngineSpec(
    block_tokens=16,
    planned_blocks=600,
    layers=4,
    kv_heads=4,
    head_dim=16,
    own_scheduler=True,
)
#: Of D's kernels.
_NOISE = 1e-3
_SECONDS = 20.0
_MEETING_SECONDS = 0.2
#: What the kernels of two engines may differ by, in a number of either cache.
_NEAR = 0.25
UNLIKE = {"like": SPEC, "unlike": replace(SPEC, block_tokens=32, planned_blocks=300)}


def watched(spec: EngineSpec, how: str, **more: Any) -> EngineSpec:
    """The same engine with a witness."""
    return replace(spec, settings=(*spec.settings, (WITNESS, how)), **more)


@dataclass(frozen=True)
class Pair:
    """A P and a D that has learnt what good loads from it look like."""

    stage: Stage
    prefill: Actor
    decode: Actor

    def introduce(self) -> None:
        """Has D serve the first prompt, which it may compute itself (<= 0.20)."""
        prompt = self.stage.prompt(TOKENS)
        self.decode.call("live", self.prefill.compute(prompt), _SECONDS)
        heard, end = set(), time.monotonic() + _SECONDS
        while not heard and time.monotonic() < end:  # P is told in steps of D's
            self.decode.call("go_on", _MEETING_SECONDS)
            heard = self.prefill.heard([prompt], 0.0)
        assert heard == {prompt.name}

    def load(self, fault: str = "", where: str = "", tokens: int = TOKENS) -> tuple[Prompt, str]:
        """Has D serve a prompt; what has become of it."""
        prompt = self.stage.prompt(tokens)
        (ask,) = self.prefill.compute(prompt)
        if fault:
            self.prefill.call("spoil", prompt.name, fault, where)
        (status,) = self.decode.call("live", [ask], _SECONDS).values()
        assert self.prefill.heard([prompt]) == {prompt.name}, status
        return prompt, status

    def witness(self) -> dict[str, Any]:
        """What D's witness has seen so far."""
        found: dict[str, Any] = self.decode.call("witness")
        return found

    def calibrate(self) -> None:
        """Has D load until it knows what good loads look like."""
        for _ in range(CALIBRATION_LOADS + 1):
            self.load()
            if self.witness()["witnessed"]:
                return
        raise AssertionError(f"not calibrated: {self.witness()}")


def pair(stage: Stage, remote: EngineSpec, local: EngineSpec) -> Pair:
    prefill, decode = stage.prefill(remote), stage.decode(local)
    prefill.call("use_model", 0.0)
    decode.call("use_model", _NOISE)
    found = Pair(stage, prefill, decode)
    found.introduce()
    return found


def skip_where_last_blocks_are_not_loaded(release: str) -> None:
    if moves_full_blocks_only(release):
        pytest.skip("0.10.0 loads whole blocks alone")


@pytest.fixture(scope="module", params=UNLIKE)
def calibrated(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Pair]:
    skip_where_last_blocks_are_not_loaded(lab.release)
    with Stage(lab) as stage:
        found = pair(stage, UNLIKE[request.param], watched(SPEC, "log"))
        found.calibrate()
        yield found


def test_good_loads_are_no_alarms(calibrated: Pair) -> None:
    before = calibrated.witness()
    for _ in range(5):
        assert calibrated.load()[1] == "FINISHED_LENGTH_CAPPED"

    after = calibrated.witness()
    assert after["witnessed"] == before["witnessed"] + 5
    assert after["alarms"] == before["alarms"]


@pytest.mark.parametrize(
    ("fault", "where", "suspect"),
    [
        ("all stale", "", "the context"),
        ("stale block", "early", "the context"),
        ("stale block", "middle", "the context"),
        ("stale block", "late", "the context"),
        ("zeroed block", "middle", "the context"),
        ("heads swapped", "middle", "the context"),
        ("zeros", "middle", "the context"),
        ("values doubled", "middle", "the context"),
        ("another last token", "", "the last token itself"),
    ],
)
def test_faults_are_alarms(calibrated: Pair, fault: str, where: str, suspect: str) -> None:
    before = calibrated.witness()
    prompt, status = calibrated.load(fault, where)

    after = calibrated.witness()
    assert status == "FINISHED_LENGTH_CAPPED"  # it only says so
    assert after["alarms"] == before["alarms"] + 1
    request_id, engine_id, *_, found = after["latest"][-1]
    assert (request_id, engine_id) == (prompt.name, calibrated.prefill.engine_id)
    assert found == suspect


def test_a_fault_in_the_last_layer_alone_is_not_seen(calibrated: Pair) -> None:
    """What it cannot see: nothing that D computes before the last layer depends on that."""
    before = calibrated.witness()
    calibrated.load("all of a layer stale", "last")

    after = calibrated.witness()
    assert after["witnessed"] == before["witnessed"] + 1
    assert after["alarms"] == before["alarms"]


def test_off_looks_at_nothing(lab: Lab) -> None:
    """The negative control: bad loads go by."""
    skip_where_last_blocks_are_not_loaded(lab.release)
    with Stage(lab) as stage:
        found = pair(stage, SPEC, SPEC)
        for fault in ("", "all stale"):
            assert found.load(fault)[1] == "FINISHED_LENGTH_CAPPED"
        assert found.decode.call("witness") is None


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_each_rank_looks_at_its_heads(lab: Lab, ranks: tuple[int, int]) -> None:
    skip_where_last_blocks_are_not_loaded(lab.release)
    remote, local = (replace(SPEC, tp_size=size) for size in ranks)
    with Stage(lab) as stage:
        found = pair(stage, remote, watched(local, "log"))
        found.calibrate()
        found.load()
        assert not found.witness()["alarms"]

        found.load("all stale")

        assert found.witness()["alarms"] == 1


def test_what_is_behind_a_prefix_hit_is_witnessed_too(calibrated: Pair) -> None:
    """The second time D has all but the last block of a prompt."""
    prompt = calibrated.stage.prompt(TOKENS)
    calibrated.decode.call("live", calibrated.prefill.compute(prompt), _SECONDS)
    before = calibrated.witness()
    again = replace(prompt, name=f"{prompt.name}-again")
    (ask,) = calibrated.prefill.compute(again)

    calibrated.decode.call("live", [ask], _SECONDS)

    after = calibrated.witness()
    assert after["witnessed"] == before["witnessed"] + 1
    assert after["alarms"] == before["alarms"]


def can_enforce(release: str) -> bool:
    """From 0.11.1 a scheduler is told of blocks that were not loaded."""
    return FACTS[release].failed_loads != "unknown"


def _knows_policies(release: str) -> bool:
    """<= 0.12 the prompt is computed, and nothing can be said of that."""
    return RELEASES.index(release) >= RELEASES.index("0.13.0")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_enforced_a_bad_load_leaves_no_token(lab: Lab, policy: str) -> None:
    """The request is computed here, or ends; a good load before and after it is served."""
    if not can_enforce(lab.release):
        pytest.skip("<= 0.11.0 the scheduler knows no failed loads")
    if policy == "fail" and not _knows_policies(lab.release):
        pytest.skip("<= 0.12 every failed load is computed")
    wanted = policy if _knows_policies(lab.release) else ""
    # The first runner, which computes a prompt again.
    local = replace(SPEC, settings=(("VLLM_USE_V2_MODEL_RUNNER", "0"),))
    with Stage(lab) as stage:
        found = pair(stage, SPEC, watched(local, "enforce", load_failure_policy=wanted))
        found.calibrate()
        assert found.load()[1] == "FINISHED_LENGTH_CAPPED"
        assert not found.witness()["alarms"]

        prompt, status = found.load("all stale")

        assert found.witness()["enforced"] == 1
        if policy == "fail":
            assert status == "FINISHED_ERROR"
        else:
            assert status == "FINISHED_LENGTH_CAPPED"
            assert found.decode.call("farthest_from_right", prompt) < _NEAR
        assert found.load()[1] == "FINISHED_LENGTH_CAPPED"
        assert found.witness()["alarms"] == 1


def test_logged_alone_a_bad_load_is_served(calibrated: Pair) -> None:
    """The negative control of the one before: what D answers from is far from right."""
    prompt, status = calibrated.load("all stale")
    assert status == "FINISHED_LENGTH_CAPPED"
    assert calibrated.decode.call("farthest_from_right", prompt) > 10 * _NEAR


def test_steps_scheduled_ahead_are_not_taken_back(lab: Lab) -> None:
    """Of what D says of it, alarms are left."""
    if not can_enforce(lab.release):
        pytest.skip("<= 0.11.0 the scheduler knows no failed loads")
    spec = watched(SPEC, "enforce", schedules_ahead=True, answer_tokens=2)
    with Stage(lab) as stage:
        found = pair(stage, SPEC, spec)
        found.calibrate()

        found.load("all stale")

        seen = found.witness()
        assert (seen["alarms"], seen["enforced"]) == (1, 0)
