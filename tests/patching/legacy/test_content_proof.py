"""What handshakes leave open of a peer's blocks, and what its memory shows of them."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.connector.recent_engines import MOST_ENGINES
from kvpatch.connector.state import scheduler_state
from kvpatch.core.releases import FACTS
from kvpatch.legacy.content_proof.kernel_block_splits import chunks_to_look_at, possible_splits
from kvpatch.legacy.content_proof.prover import ContentProver
from kvpatch.legacy.content_proof.readable_engines import (
    ReadableEngines,
    ReadableReports,
    hear_workers,
    readable_engines_of,
    report_of,
    reports_in,
    tell_scheduler,
)
from kvpatch.legacy.content_proof.wrappers import _update_from_kv_xfer_finished

pytestmark = pytest.mark.patching

PARTS = (1, 2, 4)


def _table(parts: int, blocks: int, seed: int) -> list[int]:
    """Blocks that a pool has handed out, in any order."""
    return random.Random(seed).sample(range(1, 40), blocks)


def _held(table: list[int], parts: int) -> dict[int, int]:
    """By kernel block the chunk that it really holds."""
    return {
        block * parts + part: place * parts + part
        for place, block in enumerate(table)
        for part in range(parts)
    }


def _seen(
    ids: list[int], table: list[int], parts: int, kernel_tokens: int = 64
) -> list[tuple[int, int]]:
    """What is found where chunks would lie, whatever the ids are taken for."""
    held = _held(table, parts)
    known = range(len(table) * parts * kernel_tokens)
    found = {
        (chunk.number, chunk.block)
        for guess in PARTS
        for chunk in chunks_to_look_at(ids, guess, kernel_tokens, known)
    }
    return [(number, block) for number, block in found if held.get(block) == number]


@given(st.sampled_from(PARTS), st.integers(1, 8), st.integers(), st.booleans())
def test_the_true_cut_is_never_ruled_out(
    parts: int, blocks: int, seed: int, is_known: bool
) -> None:
    table = _table(parts, blocks, seed)
    written = parts if is_known else None
    assert parts in possible_splits(PARTS, _seen(table, table, parts), written)


@given(
    st.sampled_from(PARTS),
    st.lists(st.integers(1, 200), min_size=1, max_size=16),
    st.integers(1, 8),
    st.integers(),
)
def test_no_ids_prove_a_wrong_cut(parts: int, ids: list[int], blocks: int, seed: int) -> None:
    """Whatever a client names: what it does not find proves nothing, and the rest is true."""
    table = _table(parts, blocks, seed)
    left = possible_splits(PARTS, _seen(ids, table, parts), parts)
    assert parts in left


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("pretended", PARTS)
@given(st.integers(1, 6), st.integers())
def test_ids_that_pretend_other_blocks_prove_no_wrong_cut(
    parts: int, pretended: int, blocks: int, seed: int
) -> None:
    """All that they name is there, as if P's blocks were of another size."""
    table = _table(parts, blocks * 4, seed)
    if pretended < parts:
        step = parts // pretended
        ids = [block * step + part for block in table for part in range(step)]
    else:  # an adversary got blocks side by side
        step = pretended // parts
        starts = random.Random(seed).sample(range(1, 20), blocks)
        table = [start * step + part for start in starts for part in range(step)]
        ids = starts

    seen = _seen(ids, table, parts)
    assert len(seen) >= min(len(ids), 8), "all that was looked for is found"

    assert parts in possible_splits(PARTS, seen, parts)
    assert parts in possible_splits(PARTS, seen, None)


def test_ids_of_a_new_pool_settle_it() -> None:
    """Its first block is number 1, so that the first chunk tells whole blocks from cut ones."""
    assert possible_splits(PARTS, [(0, 1)], None) == {1}
    assert possible_splits(PARTS, [(0, 2)], None) == {1, 2}
    assert possible_splits(PARTS, [(0, 2)], 2) == {2}, "nobody wrote to kernel block 1"
    assert possible_splits(PARTS, [(0, 2)], 1) == {1, 2}
    assert possible_splits(PARTS, [(0, 2)], 3) == {1, 2}, "which begins no block"
    assert possible_splits((1, 3, 5), [(0, 5)], 5) == {5}, "80 beside 48, in kernel blocks of 16"
    assert possible_splits((33, 35), [(0, 35)], None) == {35}, "560 beside 528"


def test_blocks_that_slid_out_of_a_window_are_not_looked_at() -> None:
    found = list(chunks_to_look_at([0, 7, 9], 2, 16, range(0, 80), first_block=0))
    assert found == [(2, 14, 16), (4, 18, 16)]
    found = list(chunks_to_look_at([7, 9], 2, 16, range(48, 130), first_block=1))
    assert found == [(3, 15, 16), (4, 18, 16)], "the first that we know of each"


# -- what scheduler and workers tell one another --------------------------------------


def test_a_scheduler_loads_from_what_workers_announced() -> None:
    readable = ReadableEngines(16)
    assert not readable.allow("p", 5, 79)
    readable.prove("p", 64)
    assert readable.allow("p", 1, 10)
    assert not readable.allow("p", 0, 10)
    assert not readable.allow("q", 5, 79)


@pytest.mark.parametrize(
    ("release", "layout", "loads"),
    [
        ("0.10.1", {}, True),
        ("0.10.0", {}, False),
        ("0.10.0", {"KVPATCH_PEER_LAYOUT": "NHD"}, True),
    ],
)
def test_a_scheduler_loads_from_what_is_declared(monkeypatch, release, layout, loads):
    """0.10.0 does not state the layout either."""
    for name, value in {"KVPATCH_PEER_BLOCK_SIZE": "64", **layout}.items():
        monkeypatch.setenv(name, value)
    readable = readable_engines_of(_Scheduler(release))
    assert readable.allow("p", 2, 128) is loads


def test_a_scheduler_asks_for_no_more_than_whole_blocks_hold() -> None:
    """0.10.0: 150 tokens are two whole blocks of 64, and 144 in ours of 16."""
    readable = ReadableEngines(16, full_blocks_only=True)
    readable.prove("p", 64)
    assert readable.allow("p", 2, 128)
    assert not readable.allow("p", 2, 144)


class _Scheduler:
    def __init__(self, release: str, method: str | None = None) -> None:
        scheduler_state(self).facts = FACTS[release]
        speculation = None if method is None else SimpleNamespace(method=method)
        self.vllm_config = SimpleNamespace(speculative_config=speculation)
        self.block_size = 16


@pytest.mark.parametrize(
    ("method", "allows"), [(None, True), ("ngram", True), ("eagle", False), ("deepseek_mtp", False)]
)
def test_0100_loads_nothing_where_it_reserves_slots_for_drafts(method, allows):
    """A hit of one block of 16, 64 tokens in all: 0.10.0 names 4 blocks of its own for 3 of P's."""
    readable = readable_engines_of(_Scheduler("0.10.0", method))
    readable.prove("p", 16)
    assert readable.allow("p", blocks=4, needed_tokens=64) is allows


@pytest.mark.parametrize(
    ("said", "holds"), [((False, False), False), ((False, True), True), ((None, None), False)]
)
def test_a_scheduler_holds_back_where_a_worker_may_have_to_prove(said, holds):
    scheduler, stated = _Scheduler("0.20.1"), []
    for one in said:
        metadata = SimpleNamespace()
        if one is not None:
            tell_scheduler(metadata, may_be_ambiguous=one)
        stated.append(metadata)

    hear_workers(scheduler, stated)

    assert readable_engines_of(scheduler).allow("p", 5, 79) is not holds
    assert not any(vars(metadata) for metadata in stated), "nothing of it goes to peers"


def _said(reports: ReadableReports) -> set[str]:
    return reports.received(None, set()) or set()


def test_a_worker_announces_an_engine_once() -> None:
    reports = ReadableReports()
    reports.settle("p", 64)
    assert _said(reports) == set(), "its scheduler may have no kvpatch"
    reports.listen()
    reports.settle("p", 64)
    found = _said(reports)
    assert reports_in([*found, "a request"]) == {report_of("p", 64): ("p", 64)}
    assert _said(reports) == set()
    reports.unsettle("p")
    reports.settle("p", 128)
    assert reports_in(_said(reports)) == {report_of("p", 128): ("p", 128)}


def test_a_request_that_is_computed_is_never_received() -> None:
    """A release reports those whose handshake failed, and 0.20's scheduler ends at one."""
    reports = ReadableReports()
    reports.compute("computed")
    assert reports.received({"computed", "loaded"}, set()) == {"loaded"}
    assert reports.received({"loaded"}, {"computed"}) == {"loaded"}
    assert reports.received({"computed"}, set()) == {"computed"}, "a new one of that id"


def test_a_request_that_is_loaded_under_the_name_of_a_computed_one_is_received() -> None:
    """<= 0.13 a client chooses the name, and the first may end with the step of the second."""
    reports = ReadableReports()
    reports.compute("chosen")
    reports.load("chosen")

    assert reports.received({"chosen"}, {"chosen"}) == {"chosen"}


def test_an_announcement_is_heard_beside_a_connector_without_a_scheduler_half() -> None:
    """A MultiConnector has other kinds too; the engine core ended at the first announcement."""
    nixl = SimpleNamespace(connector_scheduler=_Scheduler("0.13.0"))
    beside = (SimpleNamespace(), SimpleNamespace(connector_scheduler=None))
    core = SimpleNamespace(connector=SimpleNamespace(_connectors=[*beside, nixl]))
    readable = readable_engines_of(nixl.connector_scheduler)
    assert not readable.allow("p", 5, 79)
    output = SimpleNamespace(finished_recving={report_of("p", 64), "a request"})

    _update_from_kv_xfer_finished(lambda _: None, core, (output,), {})

    assert readable.allow("p", 5, 79)
    assert output.finished_recving == {"a request"}


def test_no_announcement_is_lost_between_threads() -> None:
    reports = ReadableReports()
    reports.listen()
    count, heard = 20_000, set()

    def shake_hands() -> None:
        for number in range(count):
            reports.settle(str(number))

    thread = threading.Thread(target=shake_hands)
    thread.start()
    while thread.is_alive():
        heard |= _said(reports)
    thread.join()
    heard |= _said(reports)

    assert len(heard) == count


def test_a_hundred_thousand_engines_are_not_kept():
    readable, reports = ReadableEngines(16), ReadableReports()
    for number in range(100_000):
        readable.prove(f"e{number}", 16)
        reports.settle(f"e{number}", 16)

    assert len(readable._known) == len(reports._settled) == MOST_ENGINES
    assert readable.allow("e99999", 1, 16)
    assert not readable.allow("e0", 1, 16)


def test_an_engine_that_is_forgotten_is_open_no_more() -> None:
    proofs = object.__new__(ContentProver)
    proofs._peers = {"open": SimpleNamespace()}
    proofs._reports = ReadableReports()
    proofs._reports.settle("settled")

    proofs.forget("open")
    proofs.forget("settled")

    assert proofs.engine_ids == ()
    assert not proofs._reports.is_settled("settled")
