"""P's digests, over real NIXL, two agents in one process; what fails is labelled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from threading import Event, Thread

import pytest
import torch

from kvpatch.checks import digest_check as read_module
from kvpatch.checks import worker_digests as maker_module
from kvpatch.checks.cache_digests import DigestStream, TableTokens
from kvpatch.checks.digest_check import (
    _RING_END,
    _RING_START,
    _SLOTS,
    MOST_BYTES,
    DigestCheck,
    DigestRead,
    DigestTable,
)
from kvpatch.checks.tables import PAUSE_SECONDS, generation_of
from kvpatch.checks.worker_digests import DigestMaker, Order
from kvpatch.core.errors import NoDigest
from kvpatch.observe.book import Book, ComparedRead, Sample
from kvpatch.observe.catalogue import DIGEST_ALARMS, DIGESTS, CheckResult, Proof
from kvpatch.transfer.lease import Lifetime
from kvpatch.transfer.one_memory import Bytes

from .digest_world import Engine, Rank, request_of
from .staged_world import SECONDS, Held, Tables, connected_world, stays, waits_for

pytestmark = pytest.mark.lab

START = 7
FIRST = generation_of(START, 1)
TOKENS = 70


class DigestTables(Tables):
    """Tables of digests."""

    def read(self, generation: int = FIRST) -> DigestRead:
        return DigestRead(self.decode, self.world.ends.agent, self.prefill.address, generation)

    def answer(self, read: DigestRead) -> bytes:
        found = self.until_known(read.answer)
        read.release(self.world.decode)
        return bytes(found)


@pytest.fixture
def tables() -> Iterator[DigestTables]:
    with connected_world(DigestTable) as world:
        yield DigestTables(*world.kept, world)


def test_what_is_written_is_read(tables):
    tables.prefill.write(FIRST, b"digests")
    assert tables.answer(tables.read()) == b"digests"
    tables.prefill.write(FIRST, b"x" * MOST_BYTES)
    assert tables.answer(tables.read()) == b"x" * MOST_BYTES


@pytest.mark.parametrize("content", [None, b"", b"x" * (MOST_BYTES + 1)])
def test_what_has_no_room_or_is_nothing_is_said_to_be_none(tables, content):
    tables.prefill.write(FIRST, content)
    with pytest.raises(NoDigest, match="has no digest"):
        tables.answer(tables.read())


def test_what_is_not_there_yet_is_waited_for(tables, monkeypatch):
    read = tables.read()
    stays(lambda: read.answer(tables.world.decode), None)
    tables.prefill.write(FIRST, b"late")
    assert tables.answer(read) == b"late"
    monkeypatch.setattr(read_module, "_MOST_POLLS", 20)
    with pytest.raises(NoDigest, match="is not written"):
        tables.answer(tables.read(generation_of(START, 2)))


def test_a_later_request_in_the_same_place_has_taken_it(tables):
    tables.prefill.write(generation_of(START, 1 + _SLOTS), b"later")
    with pytest.raises(NoDigest, match="none any more"):
        tables.answer(tables.read())


def test_a_ring_that_has_gone_round_is_noticed(tables):
    tables.prefill.write(FIRST, b"a" * MOST_BYTES)
    for count in range(2, 3 + (_RING_END - _RING_START) // MOST_BYTES):
        tables.prefill.write(generation_of(START, count), b"b" * MOST_BYTES)
    with pytest.raises(NoDigest, match="has written other digests over those"):
        tables.answer(tables.read())


def test_an_entry_that_points_elsewhere_is_not_followed(tables):
    tables.prefill.write(FIRST, b"digests")
    at = (FIRST >> 1) % _SLOTS * 4
    tables.prefill._words[at + 1] = 0  # the directory itself
    with pytest.raises(NoDigest):
        tables.answer(tables.read())


def test_places_are_given_back(tables):
    tables.prefill.write(FIRST, b"digests")
    for _ in range(2 * DigestTable.landings):
        tables.answer(tables.read())
    taken = [tables.decode.take_landing() for _ in range(DigestTable.landings)]
    read = tables.read()
    assert read.answer(tables.world.decode) is None
    assert read._handle is None, "there is no place"
    for landing in taken:
        tables.decode.give_back(landing)
    assert tables.answer(read) == b"digests"


def test_who_waits_for_a_digest_keeps_nobody_else_from_one(tables):
    """Of many loads at once the first ones are often those that P is late with."""
    tables.prefill.write(FIRST, b"digests")
    reads = [tables.read(generation_of(START, 2)) for _ in range(2 * DigestTable.landings)]
    good, found = tables.read(), None
    end = time.monotonic() + SECONDS
    while found is None and time.monotonic() < end:
        for read in reads:
            assert read.answer(tables.world.decode) is None
        found = good.answer(tables.world.decode)
    assert found == b"digests"
    for read in reads:
        read.release(tables.world.decode)
    assert len(tables.decode._free) == DigestTable.landings


@pytest.mark.parametrize("is_on_its_way", [True, False])
def test_a_freeze_of_any_length_leaves_no_load_unchecked(tables, monkeypatch, is_on_its_way):
    """Made up: the clock of a process that was stopped for an hour; P writes meanwhile."""
    read, clock = tables.read(), time.monotonic
    agent, read.is_paced = tables.world.decode, is_on_its_way  # then it is not waited for
    with monkeypatch.context() as patch:
        if is_on_its_way:  # a small one may be there at once
            transfer = agent.transfer
            patch.setattr(agent, "transfer", lambda handle: (transfer(handle), "PROC")[1])
        assert read.answer(agent) is None
    while (read._handle is not None) != is_on_its_way:
        read.answer(agent)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
    for _ in range(3):
        assert read.answer(tables.world.decode) is None
    tables.prefill.write(FIRST, b"digests")
    assert tables.answer(read) == b"digests"


@pytest.mark.parametrize("has_place", [True, False])
def test_what_does_not_come_is_not_waited_for_for_ever(tables, monkeypatch, has_place):
    monkeypatch.setattr(read_module, "_MOST_POLLS", 3)
    monkeypatch.setattr(tables.world.decode, "check_xfer_state", lambda handle: "PROC")
    taken = [] if has_place else [tables.decode.take_landing() for _ in range(DigestTable.landings)]
    read = tables.read()
    assert read.answer(tables.world.decode) is None
    with pytest.raises(NoDigest, match="many others are on their way"):
        for _ in range(12):
            time.sleep(PAUSE_SECONDS)
            assert read.answer(tables.world.decode) is None
    read.release(tables.world.decode)
    assert len(taken) + len(tables.decode._free) == DigestTable.landings


# --- both sides -------------------------------------------------------------------


def table_of(engine: Engine, first_token: int = 0, end_token: int = TOKENS) -> TableTokens:
    first = max(first_token, engine.blocks.first_token)
    memory = Bytes(engine.address, engine.memory)
    memories = dict.fromkeys((plane.layer for plane in engine.planes), memory)
    tensors = {plane.layer: engine.memory for plane in engine.planes}
    return TableTokens(tensors, memories, tuple(engine.planes), engine.blocks, first, end_token)


class Load:
    """P's digest of a request, and a D that compares one of its own.

    Attributes:
        compared: what the last comparison has found.
    """

    def __init__(self, tables: DigestTables, decode: Engine, prefill: Engine) -> None:
        self.tables, self.decode, self.prefill = tables, decode, prefill
        self.compared = ComparedRead()

    def maker(self, *, is_sample: bool = False) -> tuple[DigestMaker, DigestStream]:
        stream = DigestStream(self.prefill.memory.device)
        return DigestMaker(self.tables.prefill, stream, is_sample=is_sample), stream

    def digest(self, *, is_sample: bool = False, end_token: int = TOKENS) -> None:
        maker, stream = self.maker(is_sample=is_sample)
        table = table_of(self.prefill, end_token=end_token)
        maker.add(Order(FIRST, [table], end_token, lambda: True, None))
        stream.thread.shutdown()

    def check(self, *, is_sample: bool = False, first_token: int = 0) -> bool:
        tables = [table_of(self.decode, first_token)]
        stream = DigestStream(self.prefill.memory.device)
        self.compared = ComparedRead()
        check = DigestCheck(self.tables.read(), tables, "request", stream, self.compared, is_sample)
        found = self.tables.until_known(partial(check.ask, has_begun=True))
        assert check.ask(self.tables.world.decode, has_begun=True) is CheckResult.HELD
        check.release(self.tables.world.decode)
        return found is CheckResult.HELD


RANKS = {
    "like": Rank(seed=2),
    "larger blocks": Rank("NHD", 48, seed=2),
    "half of the heads": Rank(heads=range(2, 4), seed=2),
    "a prefix hit": Rank(first_token=32, seed=2),
    "a hit inside a range": Rank(block_tokens=8, first_token=24, seed=2),
}


@pytest.fixture(params=RANKS)
def load(tables, request) -> Load:
    found = request_of(tokens=TOKENS)
    return Load(tables, Engine(found, RANKS[request.param]), Engine(found, Rank()))


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_a_good_load_is_checked(load, ours, theirs):
    load.digest(is_sample=theirs)
    assert load.check(is_sample=ours)
    is_whole = load.decode.blocks.first_token % 16 == 0
    # Else what it has loaded of its first range was compared with nothing.
    is_checked = is_whole or ours or theirs
    assert load.compared.proof is (Proof.CHECKED if is_checked else Proof.PARTLY)


def test_a_read_of_a_digest_that_cannot_be_cancelled_fails_no_load(load, monkeypatch):
    """P is late, and NIXL does not let go: nothing is wrong with what was loaded."""
    monkeypatch.setattr(read_module, "_MOST_POLLS", 20)
    agent = load.tables.world.decode
    from nixl._bindings import nixlBackendError

    def release(handle: object) -> None:
        raise nixlBackendError("cannot be cancelled")

    monkeypatch.setattr(agent, "check_xfer_state", lambda handle: "PROC")
    monkeypatch.setattr(agent, "release_xfer_handle", release)

    assert load.check()
    assert load.compared.proof is Proof.UNCHECKED


def test_blocks_that_are_let_go_of_while_they_are_read_get_no_digest(load, monkeypatch):
    """Nothing of what was read of them is written down."""
    asked = iter([True, False, False])
    maker, stream = load.maker()
    maker.add(Order(FIRST, [table_of(load.prefill)], TOKENS, lambda: next(asked), None))
    stream.thread.shutdown()
    assert load.check()
    assert load.compared.proof is Proof.UNCHECKED


@pytest.mark.parametrize(
    ("lacks", "proof"),
    [("a token", Proof.PARTLY), ("a layer", Proof.UNCHECKED), ("most of a range", Proof.UNCHECKED)],
)
def test_what_is_compared_with_nothing_is_not_taken_for_checked(load, lacks, proof):
    """P lacks a token (a proxy gives D a longer prompt) or a layer, or D has read three tokens."""
    if lacks == "a layer":
        load.prefill.planes = load.prefill.planes[:-1]
    load.digest(end_token=TOKENS - (lacks == "a token"))
    assert load.check(first_token=TOKENS - 3 if lacks == "most of a range" else 0)
    assert load.compared.proof is proof


@pytest.mark.parametrize("are_many", [True, False])
def test_what_comes_faster_than_it_is_digested_is_left_undone(
    tables, caplog, monkeypatch, are_many
):
    """And nobody waits for it; P's log says so once. One that is late and alone was frozen."""
    monkeypatch.setattr(maker_module, "_LONGEST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(maker_module, "_MOST_WAITING", 1 if are_many else 2)
    stream, goes_on, made = DigestStream(torch.device("cpu")), Event(), []
    maker = DigestMaker(tables.prefill, stream, is_sample=False)

    def order(count: int) -> Order:
        def is_held() -> bool:
            made.append(count)
            return goes_on.wait(SECONDS)

        return Order(generation_of(START, count), [], TOKENS, is_held, None)

    with caplog.at_level("WARNING"):
        for count in (1, 2, 3):
            maker.add(order(count))
        time.sleep(0.1)
        goes_on.set()
        stream.thread.shutdown()
    assert set(made) == ({1, 3} if are_many else {1, 2, 3})
    with pytest.raises(NoDigest, match="has no digest"):
        tables.answer(tables.read(generation_of(START, 2)))
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == are_many
    assert all("KVPATCH_DIGEST=sample" in line for line in told)


def test_where_no_thread_is_to_be_had_nothing_is_raised(tables, caplog, monkeypatch):
    """Into the engine's step it would be."""
    stream = DigestStream(torch.device("cpu"))
    maker = DigestMaker(tables.prefill, stream, is_sample=False)

    def submit(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stream.thread, "submit", submit)
    with caplog.at_level("WARNING"):
        maker.add(Order(FIRST, [], TOKENS, lambda: True, None))
    assert "can't start new thread" in caplog.text
    with pytest.raises(NoDigest, match="has no digest"):  # D need not wait for it
        tables.answer(tables.read())


def is_read(stream: DigestStream) -> bool:
    """True if the cache is read, on the stream's thread."""
    is_free = stream.work.acquire(blocking=False)
    if is_free:
        stream.work.release()
    return not is_free


@pytest.mark.parametrize("is_sleep", [False, True])
def test_blocks_are_given_away_once_nothing_is_read_of_them(tables, is_sleep):
    """Where another request is read nobody waits for that, but an engine that goes to sleep."""
    stream, reading, held = DigestStream(torch.device("cpu")), Held(), [True]
    maker = DigestMaker(tables.prefill, stream, is_sample=False)

    def is_held() -> bool:
        if not reading.is_in.is_set():
            reading()
        return held[0]

    maker.add(Order(FIRST, [], TOKENS, is_held, None))
    reading.is_in.wait(SECONDS)
    if not is_sleep:
        maker.settle()
        held[0] = False
    assert is_read(stream), "while it is held"
    waits_for(stream.settle if is_sleep else maker.settle, reading)
    assert not is_read(stream)
    stream.thread.shutdown()


def test_a_load_that_is_given_up_is_read_no_more(load):
    """And waits for what is read: the blocks are another request's when this returns."""
    load.digest()
    stream, world = DigestStream(torch.device("cpu")), load.tables.world.decode
    check = DigestCheck(
        load.tables.read(), [table_of(load.decode)], "request", stream, load.compared, False
    )
    with stream.work:  # STAND-IN for a comparison that takes long
        while check._future is None or not check._future.running():
            assert check.ask(world, has_begun=True) is None
        waits = Thread(target=check.release, args=(world,))
        waits.start()
        waits.join(0.05)
        assert waits.is_alive()
    waits.join(SECONDS)
    stream.thread.shutdown()
    assert check._future.result() == ((), Proof.UNCHECKED)


def test_each_load_is_counted_once():
    """By the least that is proven of its reads; one that failed for other reasons is not."""
    book = Book()
    book.take()
    book.report({"where digests are off"})
    assert not [one for one in book.take() if one.name == DIGESTS.name]
    book.has_digests = True

    def told(name: str, *proofs: Proof, failed: bool = False) -> list[Sample]:
        for number, proof in enumerate(proofs):
            book.watch(name, Lifetime(compared=ComparedRead(proof, f"layers.{number}")))
        book.report({name}, {name} if failed else ())
        return [one for one in book.take() if one.name in (DIGESTS.name, DIGEST_ALARMS.name)]

    for proofs, expected in (
        ((Proof.CHECKED, Proof.CHECKED), "checked"),
        ((Proof.CHECKED, Proof.PARTLY), "partly"),
        ((Proof.CHECKED, Proof.UNCHECKED, Proof.PARTLY), "unchecked"),
        ((), "unchecked"),
    ):
        assert told("a", *proofs) == [(DIGESTS.name, expected, 1)]
    assert told("b", Proof.CHECKED, Proof.ALARM, Proof.ALARM, failed=True) == [
        (DIGESTS.name, "alarm", 1),
        (DIGEST_ALARMS.name, "layers.1", 1),
    ]
    assert told("c", Proof.UNCHECKED, failed=True) == []
