"""What is counted, how it travels in a release's statistics, and what a front end shows of it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge

from kvpatch.core.errors import PeerRefused, ReadRefused, RegistrationRefused
from kvpatch.observe import book as payload
from kvpatch.observe.book import _MOST, _MOST_LOADS, Book, Sample
from kvpatch.observe.catalogue import (
    HELD,
    LOADS,
    METRICS,
    POOL_WAITS,
    READS,
    CheckResult,
)
from kvpatch.patches.metrics import Shown
from kvpatch.transfer.lease import Lifetime
from kvpatch.transfer.own_read import Telemetry

_LOAD_METRICS = (LOADS.name, HELD.name)


class TestBook:
    @pytest.mark.parametrize("kind", [PeerRefused, ReadRefused, RegistrationRefused, ValueError])
    def test_a_refusal_is_booked_by_its_class_and_goes_on(self, kind: type[Exception]) -> None:
        book, is_ours = Book(), kind is not ValueError

        with pytest.raises(kind), book.refusals():
            raise kind("no", "use x")

        assert [label for _, label, _ in book.take()] == [kind.__name__] * is_ours

    @pytest.mark.parametrize(
        ("verdicts", "has_failed", "told"),
        [
            ((), False, ["received", "unproven"]),
            ((None,), False, ["received", "unproven"]),
            ((CheckResult.HELD,), False, ["received", "held"]),
            ((CheckResult.HELD, CheckResult.HELD), False, ["received", "held"]),
            ((CheckResult.HELD, None), False, ["received", "unproven"]),
            ((CheckResult.HELD, CheckResult.GONE), True, ["stale", "gone"]),
            ((None, CheckResult.EXPIRED), True, ["stale", "expired"]),
            ((CheckResult.GONE, CheckResult.EXPIRED), True, ["stale", "gone"]),
            ((CheckResult.HELD,), True, ["failed"]),
            ((), True, ["failed"]),
        ],
    )
    def test_what_reads_found_of_ps_blocks(
        self, verdicts: tuple[CheckResult | None, ...], has_failed: bool, told: list[str]
    ) -> None:
        """A load counts once, however many ranks it was read from."""
        book = Book()
        book.take()
        lifetimes = [Lifetime() for _ in verdicts]
        for lifetime in lifetimes:
            book.watch("a", lifetime)
        for lifetime, verdict in zip(lifetimes, verdicts, strict=True):
            lifetime.verdict = verdict

        book.report({"a"}, {"a"} if has_failed else ())
        book.report({"b"})

        assert book.take() == [
            *((name, label, 1) for name, label in zip(_LOAD_METRICS, told, strict=False)),
            (LOADS.name, "received", 1),
            (HELD.name, "unproven", 1),
        ]

    def test_a_load_that_failed_is_told_when_it_is_reported(self) -> None:
        """With a read of it still going on others are reported before it."""
        book = Book()
        book.fail("a")

        book.report({"b"})
        book.report({"a"})
        book.report({"a"})

        labels = [label for name, label, _ in book.take() if name == LOADS.name]
        assert labels == ["received", "failed", "received"]

    def test_where_nobody_asks_it_does_not_grow(self) -> None:
        book = Book()
        for _ in range(3 * _MOST):
            book.add(READS, 1, "stock")
        for number in range(_MOST_LOADS + 5):
            book.fail(str(number))
            book.watch(str(number), Lifetime())

        assert len(book.take()) == _MOST
        assert len(book._loads) == _MOST_LOADS
        assert not any(load.lifetimes for load in book._loads.values())


class _Stats:
    """As a release has them: lists by name, of which one side's are added to the other's."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"bytes_transferred": []}

    def aggregate(self, other: _Stats) -> _Stats:
        for name, values in other.data.items():
            self.data[name].extend(values)
        return self


class TestPayload:
    def test_every_payload_has_the_list(self) -> None:
        """A process without kvpatch extends one side's by the other's, and has to find it."""
        one, other = _Stats(), _Stats()
        payload.put(one, ())
        payload.put(other, [Sample("kvpatch_reads", "direct", 1)])

        assert payload.samples_of(one.aggregate(other).data) == [["kvpatch_reads", "direct", 1]]

    def test_what_travels_is_known_everywhere(self) -> None:
        stats = _Stats()
        payload.count_read(stats, Telemetry(xferDuration=10, totalBytes=64), "staged")

        sent = pickle.dumps(stats.data)

        assert b"kvpatch." not in sent, "no class of ours"
        assert pickle.loads(sent)[payload.NAME] == [
            ["kvpatch_reads", "staged", 1],
            ["kvpatch_read_bytes", "staged", 64],
            ["kvpatch_read_seconds", "staged", pytest.approx(1e-5)],
        ]


def test_a_counter_that_is_lower_began_anew() -> None:
    book = Book()
    for waits in (0, 5, 5, 2, 3):
        book.show(POOL_WAITS, waits)

    assert [value for _, _, value in book.take()] == [5, 2, 1]


_KINDS = {Counter: Counter, Gauge: Gauge}
_ENGINES = {0: ["model", "0"], 1: ["model", "1"]}


def _shown() -> Shown:
    return Shown(_KINDS, ["model_name", "engine"], _ENGINES)


def _value(name: str, engine: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "model", "engine": engine, **labels})


class TestShown:
    def test_what_is_counted_stands_there_from_the_start(self) -> None:
        _shown()

        for metric in METRICS:
            if metric.kind == "counter":
                for value in metric.values if metric.label else ("",):
                    labels = {metric.label: value} if metric.label else {}
                    assert _value(metric.shown_name, "0", **labels) == 0

    def test_layers_are_shown_once_they_alarm_and_not_without_end(self) -> None:
        shown = _shown()
        for number in range(1000):
            shown.observe([["kvpatch_digest_alarms", f"layers.{number}", 1]], 0)
        assert _value("kvpatch_digest_alarms_total", "0", layer="layers.7") == 1
        assert _value("kvpatch_digest_alarms_total", "0", layer="layers.999") is None
        assert _value("kvpatch_digest_alarms_total", "0", layer="other") == 1000 - 512

    def test_an_engine_that_is_not_ours_is_passed_over(self) -> None:
        _shown().observe([["kvpatch_reads", "stock", 1]], 7)

        assert _value("kvpatch_reads_total", "0", way="stock") == 0

    @pytest.mark.parametrize(
        "sample",
        [
            ["kvpatch_not_yet", "x", 1],  # a newer engine's
            ["kvpatch_reads", "stock", -1],
            ["kvpatch_reads", "", 1],
            ["kvpatch_host_buffer_saved_blocks", "stock", 1],
            ["kvpatch_reads", "stock", 1, "more"],
            ["kvpatch_reads", "stock", None],
            [],
        ],
    )
    def test_what_does_not_fit_is_left_out(self, sample: list[object]) -> None:
        """An error would end the answers of the whole front end."""
        _shown().observe([sample, ["kvpatch_reads", "stock", 1]], 0)

        assert _value("kvpatch_reads_total", "0", way="stock") == 1

    def test_a_second_engine_of_a_process_takes_the_place_of_the_first(self) -> None:
        first = _shown()
        first.observe([["kvpatch_reads", "stock", 1]], 0)

        _shown()

        assert _value("kvpatch_reads_total", "0", way="stock") == 0

    def test_labels_that_can_be_asked_for_once(self) -> None:
        """Of Ray's <= 0.12 the labels that were asked for last hold for all."""

        class Single:
            counted: list[tuple[tuple[str, ...], float]] = []

            def __init__(self, **named: Any) -> None:
                self.asked: tuple[str, ...] = ()

            def labels(self, *values: str) -> Single:
                self.asked = values
                return self

            def inc(self, value: float) -> None:
                self.counted.append((self.asked, value))

        shown = Shown({Counter: Single, Gauge: Single}, ["model_name", "engine"], _ENGINES)
        shown.observe([["kvpatch_reads", "stock", 1], ["kvpatch_reads", "direct", 2]], 0)

        assert Single.counted == [(("model", "0", "stock"), 1), (("model", "0", "direct"), 2)]


def test_no_metric_has_a_name_twice_or_one_of_vllms() -> None:
    names = [metric.name for metric in METRICS]

    assert len(set(names)) == len(names)
    assert all(name.startswith("kvpatch_") and not name.endswith("_total") for name in names)
