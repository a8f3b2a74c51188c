"""Costs out of what reads and copies took; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpatch.geometry.direct_or_staged import Costs, direct_seconds, staged_seconds

#: Whatever a clock says: nothing takes no time.
_LEAST_SECONDS = 1e-9
#: So many measurements of a way before any counts: one that was slow must not end a way for good.
_LEAST_READS = 3


@dataclass(frozen=True)
class Timed:
    """Runs that took a time.

    Attributes:
        copy_seconds: of those that is the copies' alone, with nothing on the wire; 0 where nobody
            waits for copies.
        copied_bytes: what was copied in them, without what came along with it.
    """

    runs: int
    size_bytes: int
    seconds: float
    copy_seconds: float = 0.0
    copied_bytes: int = 0


def probed_costs(small: Sequence[Timed], large: Sequence[Timed], copies: Sequence[Timed]) -> Costs:
    """Costs of a machine; of several measurements the least stands, for noise only adds.

    Args:
        small: of runs that are short.
        large: of runs that are long.
        copies: out of a buffer.
    """
    wire, copy = _fastest(large), _fastest(copies)
    rate = wire.size_bytes / _surely(wire.seconds)
    of_small = min(one.seconds - one.size_bytes / rate for one in small)
    run_seconds = max(_LEAST_SECONDS, of_small / small[0].runs)
    return Costs(run_seconds, rate, rate, copy.size_bytes / _surely(copy.seconds))


def measured_costs(start: Costs, direct: Sequence[Timed], staged: Sequence[Timed]) -> Costs:
    """Costs by which reads take what a peer's own took.

    The fastest of each way counts, for noise only adds. A way that was not measured often enough
    is believed to have a wire as much slower than thought as the other one's, and runs too: what
    makes bytes slow makes their requests slow, and a way that only looks better is not to be tried
    with every read of a busy engine.

    Args:
        start: what they are measured against.
        direct: reads straight to their places. How their runs' share changed is not known: all
            of their time is taken to be as much longer.
        staged: reads through the pool.
    """
    costs = start
    has_direct = len(direct) >= _LEAST_READS
    if has_direct:
        slower = min(
            _surely(one.seconds) / direct_seconds(start, one.runs, one.size_bytes) for one in direct
        )
        costs = replace(
            costs,
            run_seconds=start.run_seconds * slower,
            wire_bytes_per_second=start.wire_bytes_per_second / slower,
            chunk_bytes_per_second=start.chunk_bytes_per_second / slower,
        )
    if len(staged) < _LEAST_READS:
        return costs
    fastest = _fastest(staged)
    landing = fastest.seconds - fastest.copy_seconds
    if fastest.copy_seconds and fastest.copied_bytes:
        costs = replace(costs, copy_bytes_per_second=fastest.copied_bytes / fastest.copy_seconds)
    if not has_direct:
        believed = staged_seconds(start, fastest.runs, fastest.size_bytes, 0)
        costs = replace(costs, run_seconds=start.run_seconds * max(1.0, landing / believed))
    rate = fastest.size_bytes / _surely(landing - fastest.runs * costs.run_seconds)
    if not has_direct:
        wire = start.wire_bytes_per_second * rate / start.chunk_bytes_per_second
        costs = replace(costs, wire_bytes_per_second=wire)
    return replace(costs, chunk_bytes_per_second=rate)


def _fastest(found: Sequence[Timed]) -> Timed:
    return min(found, key=lambda one: one.seconds / one.size_bytes)


def _surely(seconds: float) -> float:
    return max(_LEAST_SECONDS, seconds)
