"""The order of copies on a device with streams; the streams are a fake, the bytes are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.segments import BlockList, pair_blocks, uncovered_tail
from kvpatch.geometry.staged_plan import Share, plan_chunks
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.transfer import caches as caches_module
from kvpatch.transfer.caches import Caches
from tests.geometry.whole_caches import CacheSizes, as_array, named_layout

pytestmark = pytest.mark.patching

DRAM = Memory("DRAM")
SIZES = CacheSizes(layers=1, blocks=4, heads=2, block_tokens=8, channels=4, item_bytes=2)
BYTES = 1 * 4 * 2 * 2 * 8 * 4 * 2


class FakeStream:
    """Fake: work waits in it until somebody looks; a stream that waits for none goes first."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        self.add(event.wait)

    def run(self, count: int | None = None) -> None:
        now, self.work = self.work[:count], [] if count is None else self.work[count:]
        for work in now:
            work()

    def synchronize(self) -> None:
        self.run()


class FakeEvent:
    """Fake: looking at it runs its stream."""

    def record(self, stream: FakeStream) -> None:
        self._stream, self._before = stream, len(stream.work)

    def wait(self) -> None:
        self._stream.run(self._before)

    def query(self) -> bool:
        self._stream.run()
        return True


class FakeStreams:
    """Fake of ``torch.cuda``: tensors are in host memory."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self) -> None:
        self.model = self._current = FakeStream()

    def current_stream(self, device: Any) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    found = FakeStreams()
    monkeypatch.setattr(caches_module, "streams_of", lambda device: found)

    def later(real: Callable[..., None], *of: Any) -> None:
        found.current_stream(None).add(lambda: real(*of))

    for name in ("place_in_host_memory", "zero_tokens"):
        monkeypatch.setattr(caches_module, name, partial(later, getattr(caches_module, name)))
    return found


def test_copies_come_after_what_the_device_was_told_before(streams: FakeStreams) -> None:
    """A model still runs for whoever had the blocks before."""
    noise = np.random.default_rng(0)
    target = torch.from_numpy(noise.integers(0, 256, BYTES, dtype=np.uint8))
    source = noise.integers(0, 256, BYTES, dtype=np.uint8)
    remote = named_layout("LBNHC").planes(SIZES, source.ctypes.data, DRAM)
    local = named_layout("LBHNC").planes(SIZES, target.data_ptr(), DRAM)
    ids = np.arange(4)
    segments = pair_blocks(BlockList(ids, 8), BlockList(ids, 8), 0, 32)
    (round_,) = plan_chunks([Share(segments, overlaps_of([remote], local))], BYTES)
    staging = torch.zeros(round_.buffer_bytes, dtype=torch.uint8)
    for address, offset, length in zip(
        round_.remote_address, round_.staging_offset, round_.length, strict=True
    ):
        start = int(address) - source.ctypes.data
        staging[offset : offset + length] = torch.from_numpy(source[start : start + length])
    seen = []
    streams.model.add(lambda: seen.append(target.clone()))
    streams.model.add(lambda: target.fill_(0xA5))
    before = target.clone()

    caches, later = Caches({remote[0].layer: target}), []
    begun = caches.mark()
    streams.model.add(lambda: later.append(target.clone()))
    is_placed = caches.place(staging, round_.placements, begun)
    assert torch.equal(target, before), "negative control: nothing has run"
    assert is_placed()
    assert not later, "the next steps are not waited for"
    streams.model.run()

    assert torch.equal(seen[0], before), "the model read what its own request had there"
    for theirs, ours in zip(remote, local, strict=True):
        found = as_array(ours, target.numpy(), target.data_ptr())
        assert np.array_equal(found, as_array(theirs, source, source.ctypes.data))


def test_zeroes_come_after_what_the_device_was_told_before(streams: FakeStreams) -> None:
    target = torch.full((BYTES,), 7, dtype=torch.uint8)
    planes = named_layout("LBHNC").planes(SIZES, target.data_ptr(), DRAM)
    tail = uncovered_tail(BlockList(np.array([3]), 8), 5)
    streams.model.add(lambda: target.fill_(0xA5))

    caches, later = Caches({planes[0].layer: target}), []
    begun = caches.mark()
    streams.model.add(lambda: later.append(None))
    is_zeroed = caches.zero([(planes, tail)], begun)
    assert (target == 7).all(), "negative control: nothing has run"
    assert is_zeroed()
    assert not later, "the next steps are not waited for"

    for plane in planes:
        found = as_array(plane, target.numpy(), target.data_ptr())
        assert not found[3, :, 5:].any()
        assert (found[:3] == 0xA5).all()
        assert (found[3, :, :5] == 0xA5).all()
