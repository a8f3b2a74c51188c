"""What a witness learns of good loads, what it is told of loads, and what it makes of both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.connector.metrics.book import Book
from kvpatch.connector.metrics.catalogue import (
    ALARM_DISTANCE,
    ALARM_THRESHOLD,
    WITNESS_ALARMS,
    WITNESSED,
)
from kvpatch.connector.witness import loads
from kvpatch.connector.witness.calibration import (
    CALIBRATION_LOADS,
    ENFORCE_MARGIN,
    LOG_MARGIN,
    Calibration,
    farthest,
    floor_of,
    learnt,
)
from kvpatch.connector.witness.enforcement import why_not_enforced
from kvpatch.connector.witness.lens import Lens
from kvpatch.connector.witness.loads import ExpectedLoads, loads_in
from kvpatch.connector.witness.witness import Witness
from kvpatch.core.releases import FACTS

from .release_workers import worker_of

pytestmark = pytest.mark.patching

FLOOR = floor_of(2.0**-7)
GOOD = st.floats(0, 0.05)


def samples_of(planes: int = 4) -> st.SearchStrategy[Any]:
    load = st.lists(GOOD, min_size=planes, max_size=planes)
    return st.lists(load, min_size=CALIBRATION_LOADS, max_size=CALIBRATION_LOADS).map(np.array)


class TestCalibration:
    @given(samples_of())
    def test_good_loads_that_were_learnt_from_are_no_alarms(self, samples):
        peer = Calibration(4, FLOOR)
        grown = [peer.learn(sample) for sample in samples]
        assert grown == [False] * (CALIBRATION_LOADS - 1) + [True]
        assert (peer.loads, peer.left_out) == (CALIBRATION_LOADS, 0)
        for sample in samples:
            assert peer.excess(sample, 1.0) is None

    @given(samples_of(), st.integers(0, 3), st.floats(0.9, 1.4))
    def test_what_is_far_off_is_an_alarm(self, samples, plane, distance):
        limits, _ = learnt(samples, FLOOR)
        bad = np.zeros(4)
        bad[plane] = distance
        found = farthest(bad, limits * LOG_MARGIN)
        assert found is not None
        assert (found.plane, found.distance, found.beyond) == (plane, distance, {plane})
        assert found.threshold == limits[plane] * LOG_MARGIN

    @given(samples_of(), st.integers(1, CALIBRATION_LOADS // 4))
    def test_a_few_bad_loads_among_them_hide_nothing(self, samples, bad):
        expected, _ = learnt(samples[bad:], FLOOR)
        spoilt = samples.copy()
        spoilt[:bad, 1] = 1.3
        spoilt[0, 2] = np.nan
        limits, left_out = learnt(spoilt, FLOOR)
        assert left_out == bad
        assert limits == pytest.approx(expected)

    @given(samples_of())
    def test_nothing_is_below_the_floor(self, samples):
        limits, _ = learnt(samples * 0, FLOOR)
        assert (limits == FLOOR).all()

    def test_before_it_is_calibrated_nothing_is_an_alarm(self):
        peer = Calibration(2, FLOOR)
        assert peer.excess(np.array([9.0, np.nan]), LOG_MARGIN) is None

    def test_afterwards_it_keeps_no_samples(self):
        peer = Calibration(2, FLOOR)
        for _ in range(3 * CALIBRATION_LOADS):
            peer.learn(np.zeros(2))
        assert peer.loads == 3 * CALIBRATION_LOADS
        assert not peer._samples

    def test_what_is_no_number_is_farthest(self):
        found = farthest(np.array([0.5, np.nan]), np.array([0.1, 0.1]))
        assert found is not None
        assert (found.plane, found.distance) == (1, np.inf)

    def test_where_all_loads_are_strange_none_is_left_out(self):
        """As between engines whose weights are quantised in unlike ways."""
        limits, left_out = learnt(np.full((CALIBRATION_LOADS, 2), 0.3), FLOOR)
        assert (left_out, limits.tolist()) == (0, [0.3, 0.3])

    def test_types_of_fine_numbers_have_a_floor_of_their_own(self):
        assert floor_of(2.0**-23) == 1e-5 < floor_of(2.0**-7)
        assert LOG_MARGIN < ENFORCE_MARGIN


def scheduler_of(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(block_size=16, **more)


class Request(SimpleNamespace):
    """Fake: told apart as vLLM's requests are."""

    __hash__ = object.__hash__


def request_of(prompt: int, **params: Any) -> Request:
    return Request(num_prompt_tokens=prompt, kv_transfer_params=params)


def expected(prompt: int, blocks: list[int], release: str = "0.13.0") -> ExpectedLoads:
    found, facts = ExpectedLoads(), FACTS[release]
    entry = SimpleNamespace(
        local_block_ids=blocks, remote=SimpleNamespace(engine_id="P"), remote_engine_id="P"
    )
    metadata = SimpleNamespace(reqs_to_recv={"r": entry})
    found.expect(scheduler_of(), {"r": (request_of(prompt), blocks)}, metadata, facts)
    return found


def step_of(computed: int, scheduled: int, blocks: list[int], **more: Any) -> SimpleNamespace:
    new = SimpleNamespace(req_id="r", num_computed_tokens=computed, block_ids=(blocks,))
    fields = {"scheduled_new_reqs": [new], "num_scheduled_tokens": {"r": scheduled}}
    return SimpleNamespace(**{**fields, "finished_req_ids": set(), **more})


def told(found: ExpectedLoads, step: Any, release: str = "0.13.0") -> list[loads.Load]:
    metadata = SimpleNamespace()
    found.tell(scheduler_of(), step, metadata, FACTS[release])
    return loads_in(metadata)


class TestLoads:
    def test_the_last_token_is_found_in_the_last_block(self):
        (load,) = told(expected(40, [7, 8, 9]), step_of(39, 1, [7, 8, 9, 0]))
        assert load == loads.Load("r", "P", 39, (9,), (7, 8, 9), "")

    @pytest.mark.parametrize(("prompt", "blocks"), [(33, [9]), (17, [5])])
    def test_one_of_the_last_token_alone_is_none(self, prompt, blocks):
        """Behind a prefix hit: whether it has failed or not, D computes all of it."""
        table = [*range(1, -(-prompt // 16)), *blocks]
        (load,) = told(expected(prompt, blocks), step_of(prompt - 1, 1, table))
        assert load.cause == loads.ALONE
        (load,) = told(expected(prompt, table), step_of(prompt - 1, 1, table))
        assert not load.cause, "all of the prompt is loaded"
        (load,) = told(expected(prompt + 1, blocks), step_of(prompt, 1, table))
        assert not load.cause, "D computes one of two"

    def test_each_is_told_once(self):
        found = expected(40, [7, 8, 9])
        step = step_of(39, 1, [7, 8, 9])
        assert len(told(found, step)) == 1
        assert told(found, step) == []

    @pytest.mark.parametrize(("computed", "scheduled"), [(0, 40), (32, 8), (39, 2)])
    def test_where_more_is_computed_it_is_not_witnessed(self, computed, scheduled):
        (load,) = told(expected(40, [7, 8, 9]), step_of(computed, scheduled, [7, 8, 9]))
        assert load.cause == loads.SEVERAL_TOKENS

    def test_where_p_stops_earlier_it_is_not_witnessed(self):
        """0.10.0 loads whole blocks alone, and 39 tokens may be the last of one."""
        (load,) = told(expected(40, [7, 8], "0.10.0"), step_of(39, 1, [7, 8, 9]), "0.10.0")
        assert load.cause == loads.STOPPED_EARLIER

    def test_a_resumed_request_is_not_witnessed(self):
        step = step_of(39, 1, [7, 8, 9], scheduled_new_reqs=[])
        (load,) = told(expected(40, [7, 8, 9]), step)
        assert load.cause == loads.RESUMED

    def test_one_that_ended_is_not_witnessed(self):
        step = step_of(
            0, 0, [], scheduled_new_reqs=[], num_scheduled_tokens={}, finished_req_ids={"r"}
        )
        found = expected(40, [7, 8, 9])
        (load,) = told(found, step)
        assert load.cause == loads.ENDED
        assert not found._loads

    def test_a_list_that_is_too_short_is_not_witnessed(self):
        (load,) = told(expected(40, [7, 8, 9]), step_of(39, 1, [7, 8]))
        assert load.cause == loads.NO_PLACE

    def test_a_full_hit_is_no_load(self):
        assert not expected(40, [])._loads

    @pytest.mark.parametrize(("value", "is_on"), [("", False), ("off", False), ("log", True)])
    def test_is_off_unless_asked_for(self, monkeypatch, value, is_on):
        monkeypatch.setenv("KVPATCH_WITNESS", value)
        assert ExpectedLoads().is_on is is_on


class _Pending:
    def __init__(self, distances: list[list[float]]) -> None:
        self.distances, self.is_done = np.array(distances), False

    def is_ready(self) -> bool:
        return self.is_done

    def read(self) -> Any:
        self.is_done = True
        return self.distances


class _Copies:
    """Takes slots and compares them, as the test says."""

    def __init__(self) -> None:
        plane = SimpleNamespace(layer="l.0", content=SimpleNamespace(value="key"))
        other = SimpleNamespace(layer="l.1", content=SimpleNamespace(value="value"))
        self.gather = SimpleNamespace(planes=(plane, other), starts=lambda *_: np.zeros(2))
        self.pending: _Pending | None = None
        self.most_slots = 1024
        self.taken = 0

    def take(self, starts: Any) -> Any:
        self.taken = len(starts)
        return SimpleNamespace(compare=lambda: self.pending)


def witness_of(**more: Any) -> tuple[Witness, _Copies]:
    copies = _Copies()
    planes: Any = SimpleNamespace(planes=(0, 1), first_layer="l.0", seen_tokens=None)
    planes.seen_tokens = more.pop("seen_tokens", None)
    lens = Lens(planes, copies, FLOOR)  # type: ignore[arg-type]
    return Witness(Book(), lens, **more), copies


def play(witness: Witness, copies: _Copies, *distances: float, cause: str = "") -> None:
    """A step with one load."""
    copies.pending = _Pending([list(distances)])
    copies.pending.is_done = True
    load = ("r", "P", 9, (1,), (1, 2), cause)
    witness.before(SimpleNamespace(kvpatch_witnessed_loads=[load]))
    witness.after()


def calibrate(witness: Witness, copies: _Copies) -> None:
    for _ in range(CALIBRATION_LOADS):
        play(witness, copies, 0.0, 0.01)


class TestWitness:
    def test_learns_and_then_speaks(self, caplog):
        witness, copies = witness_of()
        calibrate(witness, copies)
        play(witness, copies, 0.0, 0.01)
        assert (witness.counts.learnt, witness.counts.witnessed) == (CALIBRATION_LOADS, 1)
        assert not witness.counts.alarms

        play(witness, copies, 0.0, 0.5)
        play(witness, copies, 0.1, 0.5)

        assert witness.counts.alarms == 2
        context, token = witness.counts.latest
        assert (context.layer, context.content, context.suspect) == ("l.1", "value", "the context")
        # Where the first layer is off at all, it is the token, whatever is farthest.
        assert (token.layer, token.suspect) == ("l.1", "the last token itself")
        samples = witness.counts.book.take()
        told = [sample[1:] for sample in samples if sample.name == WITNESS_ALARMS.name]
        assert told == [(context.layer, 1), (token.layer, 1)]
        far = [sample[1:] for sample in samples if sample.name == ALARM_DISTANCE.name]
        assert far == [("l.1", 0.5), ("l.1", 0.5)]
        near = [sample[1:] for sample in samples if sample.name == ALARM_THRESHOLD.name]
        assert near == [("l.1", one.threshold) for one in (context, token)]
        shown = [sample.label for sample in samples]
        assert {sample: shown.count(sample) for sample in WITNESSED.values} == {
            "learnt": CALIBRATION_LOADS,
            "good": 1,
            "alarm": 2,
            "not_witnessed": 0,
        }
        assert "50 %" in caplog.text
        assert "engine P" in caplog.text
        assert witness.take_invalid_blocks() == set()

    def test_enforced_alarms_are_blocks_that_were_not_loaded(self):
        witness, copies = witness_of(is_enforced=True)
        calibrate(witness, copies)
        play(witness, copies, 0.0, 0.03)  # an alarm, and not by far enough
        assert (witness.counts.alarms, witness.take_invalid_blocks()) == (1, set())
        play(witness, copies, 0.0, 0.5)
        assert (witness.counts.enforced, witness.take_invalid_blocks()) == (1, {1, 2})
        assert witness.take_invalid_blocks() == set()

    def test_nothing_waits_for_the_device(self):
        witness, copies = witness_of()
        calibrate(witness, copies)
        copies.pending = _Pending([[0.0, 0.9]])
        witness.before(SimpleNamespace(kvpatch_witnessed_loads=[("r", "P", 9, (1,), (1,), "")]))
        witness.after()
        assert not witness.counts.alarms
        copies.pending.is_done = True
        witness.before(SimpleNamespace())
        assert witness.counts.alarms == 1

    def test_what_cannot_be_witnessed_is_counted_by_cause(self):
        witness, copies = witness_of(seen_tokens=8)
        play(witness, copies, 0.0, 0.0)
        play(witness, copies, 0.0, 0.0, cause="because")
        blind = Witness(Book(), "recurrent state")
        play(blind, copies, 0.0, 0.0)
        assert dict(witness.counts.not_witnessed) == {
            "windows that do not see the context": 1,
            "because": 1,
        }
        assert dict(blind.counts.not_witnessed) == {"recurrent state": 1}
        assert not witness.counts.learnt + blind.counts.learnt

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_device_without_memory_ends_no_step(self, monkeypatch, caplog, when):
        witness, copies = witness_of(is_enforced=True)
        calibrate(witness, copies)

        def no_memory(*_: object) -> None:
            raise RuntimeError("out of memory")

        taken = SimpleNamespace(compare=no_memory)
        take = no_memory if when == "before" else lambda starts: taken
        with monkeypatch.context() as patched:
            patched.setattr(copies, "take", take)
            play(witness, copies, 0.0, 0.0)
            play(witness, copies, 0.0, 0.0)
        assert dict(witness.counts.not_witnessed) == {"there was no memory for it": 2}
        assert [one.levelname for one in caplog.records].count("WARNING") == 1
        play(witness, copies, 0.0, 0.0)
        assert witness.counts.witnessed == 1

    def test_more_loads_of_a_step_than_there_is_room_for_are_counted(self):
        witness, copies = witness_of()
        copies.most_slots = 2
        copies.pending = _Pending([[0.0, 0.0]] * 2)
        copies.pending.is_done = True
        loads = [(name, "P", 9, (1,), (1,), "") for name in "abc"]
        witness.before(SimpleNamespace(kvpatch_witnessed_loads=loads))
        witness.after()
        assert copies.taken == 2
        assert dict(witness.counts.not_witnessed) == {"too many ended in one step": 1}
        assert witness.counts.learnt == 2

    def test_forgets_the_peer_that_it_heard_of_least_lately(self, monkeypatch):
        from kvpatch.connector.witness import witness as module

        monkeypatch.setattr(module, "_KEPT_PEERS", 2)
        witness, copies = witness_of()
        for engine in "abac":
            copies.pending = _Pending([[0.0, 0.0]])
            copies.pending.is_done = True
            load = ("r", engine, 9, (1,), (1,), "")
            witness.before(SimpleNamespace(kvpatch_witnessed_loads=[load]))
            witness.after()
        assert list(witness._peers) == ["a", "c"]

    def test_a_new_registration_keeps_what_was_learnt(self):
        witness, copies = witness_of()
        calibrate(witness, copies)
        lens = witness._lens
        witness.look_through(lens)
        play(witness, copies, 0.0, 0.9)
        assert witness.counts.alarms == 1


def enforced(release: str, *, groups: int = 1, policy: str = "fail", **scheduler: Any) -> str:
    configuration = SimpleNamespace(
        scheduler_config=SimpleNamespace(**{"async_scheduling": False, **scheduler}),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        use_v2_model_runner=True,
    )
    plan = SimpleNamespace(kv_cache_groups=[None] * groups)
    return why_not_enforced(worker_of(release, vllm_config=configuration, kv_cache_config=plan))


class TestEnforcement:
    def test_needs_failed_loads(self):
        assert "0.11.0" in enforced("0.11.0")
        assert not enforced("0.11.1", policy="recompute")

    def test_needs_the_step_to_be_over_before_the_next(self):
        assert "--no-async-scheduling" in enforced("0.33.0", async_scheduling=True)

    def test_needs_one_cache_group(self):
        assert "several cache groups" in enforced("0.33.0", groups=2)
        assert not enforced("0.33.0")

    def test_needs_a_runner_that_computes_again(self):
        assert "VLLM_USE_V2_MODEL_RUNNER" in enforced("0.33.0", policy="recompute")
