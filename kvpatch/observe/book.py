"""The samples that a worker, or a connector's scheduler half, collects between two reports."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvpatch.core.errors import KvpatchError
from kvpatch.observe.catalogue import (
    DIGEST_ALARMS,
    DIGESTS,
    HELD,
    LOADS,
    READ_BYTES,
    READ_SECONDS,
    READS,
    REFUSALS,
    CheckResult,
    Metric,
    Outcome,
    Proof,
    Way,
)

#: Where nobody asks (a release without metrics, or the patch is off) the oldest go.
_MOST = 1024
#: Loads that are not reported yet, by far more than an engine has.
_MOST_LOADS = 16384


class Sample(NamedTuple):
    """The step of a counter, or the value of a gauge; a list once it has been between processes.

    Attributes:
        name: the name of the metric.
        label: the value of its label; empty where it has none.
    """

    name: str
    label: str
    value: float


@dataclass(eq=False)
class ComparedRead:
    """The result of comparing a read of a load with P's digest of it.

    Attributes:
        layer: of an alarm, where it was found.
    """

    proof: Proof = Proof.UNCHECKED
    layer: str = ""


class Checked(Protocol):
    """A read of a load; each is None where nothing is known, or not yet."""

    verdict: CheckResult | None
    compared: ComparedRead | None


@dataclass
class _Load:
    """The facts of one load before it is reported."""

    lifetimes: list[Checked] = field(default_factory=list)
    has_failed: bool = False


class Book:
    """The samples of one worker, or of one scheduler.

    Handshakes have threads of their own, and one thread takes everything out: no lock is needed.
    """

    def __init__(self) -> None:
        #: Whether loads are compared with digests, and counted by what these say.
        self.has_digests = False
        self._samples: deque[Sample] = deque(maxlen=_MOST)
        self._loads: dict[str, _Load] = {}
        #: By metric and label, what was shown last.
        self._shown: dict[tuple[str, str], float] = {}
        #: Whether somebody asks, which is in every step or never.
        self._is_asked = False

    def add(self, metric: Metric, value: float, label: str = "") -> None:
        """Adds a step to a counter, or a new value to a gauge."""
        self._samples.append(Sample(metric.name, label, value))

    def show(self, metric: Metric, value: float, label: str = "") -> None:
        """Tells how far a counter or a gauge is by now, if it has changed.

        A counter that is lower than before began anew.
        """
        before = self._shown.get((metric.name, label))
        if value == before:
            return
        self._shown[metric.name, label] = value
        if metric.kind == "counter":
            value -= before if before is not None and before < value else 0
        if value or metric.kind == "gauge":
            self.add(metric, value, label)

    def refuse(self, error: KvpatchError) -> None:
        self.add(REFUSALS, 1, type(error).__name__)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts each refusal of kvpatch's, while inside."""
        try:
            yield
        except KvpatchError as error:
            self.refuse(error)
            raise

    def watch(self, request_id: str, lifetime: Checked) -> None:
        """Counts a load also by what one of its reads has found. For the engine's thread."""
        if self._is_asked:  # a peer is read steps after the first
            self._load(request_id).lifetimes.append(lifetime)

    def fail(self, request_id: str) -> None:
        """Books that a load has failed which the release will report as received (<= 0.29).

        On the engine's thread, as what follows.
        """
        self._load(request_id).has_failed = True

    def _load(self, request_id: str) -> _Load:
        if request_id not in self._loads and len(self._loads) >= _MOST_LOADS:
            del self._loads[next(iter(self._loads))]
        return self._loads.setdefault(request_id, _Load())

    def report(self, received: Collection[str], failed: Collection[str] = ()) -> None:
        """Books loads that the release reports, each once.

        Args:
            received: all of them, those that failed included.
            failed: those that the release itself calls so (from 0.30).
        """
        outcomes: Counter[tuple[Metric, str]] = Counter()
        for request_id in received:
            load = self._loads.pop(request_id, None) or _Load()
            load.has_failed |= request_id in failed
            outcomes.update(_found(load))
            if self.has_digests:
                outcomes.update(_proven(load))
        for (metric, label), loads in outcomes.items():
            self.add(metric, loads, label)

    def take(self) -> list[Sample]:
        """Returns all samples and forgets them. For the engine's thread."""
        self._is_asked = True
        return [self._samples.popleft() for _ in range(len(self._samples))]


def _found(load: _Load) -> Iterator[tuple[Metric, str]]:
    """Yields the metrics that one load counts in: its outcome, and whether its blocks were held."""
    verdicts = [lifetime.verdict for lifetime in load.lifetimes]
    if not load.has_failed:
        is_held = bool(verdicts) and all(verdict is CheckResult.HELD for verdict in verdicts)
        yield LOADS, Outcome.RECEIVED.value
        yield HELD, (CheckResult.HELD if is_held else CheckResult.UNPROVEN).value
        return
    late = (CheckResult.GONE, CheckResult.EXPIRED)
    gone = next((result for result in late if result in verdicts), None)
    yield LOADS, (Outcome.FAILED if gone is None else Outcome.STALE).value
    if gone is not None:
        yield HELD, gone.value


def _proven(load: _Load) -> Iterator[tuple[Metric, str]]:
    """Yields what digests prove of one load: the least that they do of any of its reads.

    Loads that failed for other reasons are not counted.
    """
    compared = [one.compared for one in load.lifetimes if one.compared is not None]
    alarm = next((one for one in compared if one.proof is Proof.ALARM), None)
    if alarm is not None:
        yield DIGESTS, Proof.ALARM.value
        yield DIGEST_ALARMS, alarm.layer
    elif not load.has_failed:
        found = [one.proof for one in compared] or [Proof.UNCHECKED]
        yield DIGESTS, max(found, key=list(Proof).index).value


# --- samples in the release's own statistics, on their way to the front end ------------------
#
# These are lists by name, which the release extends where it brings workers together. Ours is one
# more of them; every payload of a worker has it, be it empty, so that a process without kvpatch
# finds it on both sides where it extends one by the other, and shows nothing of it.

#: In a release's statistics, beside its own names.
NAME = "kvpatch"
_SECONDS = 1e-6


def put(stats: Any, samples: Iterable[Sample]) -> None:
    """Adds samples to a release's statistics, as lists: who unpickles them may not know us."""
    stats.data.setdefault(NAME, []).extend(map(list, samples))


def samples_of(data: Mapping[str, Any]) -> list[Any]:
    """The samples in what a release sends; none where there are none."""
    found: list[Any] = data.get(NAME) or []
    return found


def without(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a release's own statistics, without kvpatch's."""
    return {name: values for name, values in data.items() if name != NAME}


def count_read(stats: Any, counts: Any, way: str = "") -> None:
    """Adds a read that is done.

    Args:
        counts: NIXL's of a transfer.
        way: the path of one of ours, which may have been prepared by the release.
    """
    way = way or Way.STOCK.value
    seconds = counts.xferDuration * _SECONDS
    read = ((READS, 1), (READ_BYTES, counts.totalBytes), (READ_SECONDS, seconds))
    put(stats, (Sample(metric.name, way, value) for metric, value in read))
