"""What P's answer says of the blocks that it holds, and what its scheduler grants."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.checks.grants import GrantedHolds, Hold, read_hold
from kvpatch.checks.tables import generation_of, is_still_to_come
from kvpatch.core.errors import ReadRefused
from kvpatch.load.read_request import HOLD, stated_for_checks
from kvpatch.transfer.nixl import mask_of
from kvpatch.worker.envelope import HOLDS, TABLES, message_on, write_message

GENERATIONS = st.builds(
    generation_of, st.integers(0, 2**32 - 1), st.integers(min_value=1, max_value=2**40)
)
ADDRESSES = st.integers(1, 2**57)


@given(GENERATIONS, st.lists(ADDRESSES, min_size=1, max_size=64))
def test_what_is_stated_is_read_again(generation, tables):
    hold = Hold(generation, tuple(tables))
    text = stated_for_checks({HOLD: str(hold)})[HOLD]
    assert read_hold(text) == hold


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1/",
        "1/2",
        "1/2/",
        "1/g/1",
        "1/2/1,",
        "1/-2/1",
        "1/2/0x10",
        "1/12345678901234567/1",
        "1/2/ffffffffffffffff",
        "1/2/" + ",".join("1" for _ in range(2000)),
        "1/2/1\n",
        "x/2/1",
        "None",
    ],
)
def test_what_no_p_says_is_refused(text):
    with pytest.raises(ReadRefused, match=HOLD):
        read_hold(text)


def test_what_a_newer_kvpatch_says_is_not_looked_at():
    assert read_hold("2/whatever it may be") is None
    assert stated_for_checks({}) == {}
    assert stated_for_checks({HOLD: ""}) == {}  # of a typed proxy, for what P did not send


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_which_words_may_still_be_to_come(start, one, other):
    found, wanted = generation_of(start, one), generation_of(start, other)
    assert found % 2 == 0
    assert is_still_to_come(found, wanted) == (one < other)
    assert is_still_to_come(found | 1, wanted) == (one < other), "an ended one is an earlier one"
    assert not is_still_to_come(generation_of(start ^ 1, one), wanted)
    assert is_still_to_come(0, wanted)


def _agent(rank: int) -> bytes:
    return f"agent {rank}".encode()


def _metadata(*tables: int | None, is_encoded: bool = False) -> list[SimpleNamespace]:
    found = [SimpleNamespace(agent_metadata=_agent(rank)) for rank in range(len(tables))]
    if is_encoded:  # from 0.13 on
        found = [
            SimpleNamespace(agent_metadata_bytes=msgspec.msgpack.encode(vars(one))) for one in found
        ]
    for one, table in zip(found, tables, strict=True):
        if table is not None:
            write_message(one, {TABLES: {HOLD: table}})
    return found


@pytest.mark.parametrize("is_encoded", [False, True])
@pytest.mark.parametrize("by_stage", [False, True])
def test_holds_are_granted_where_all_ranks_have_tables(by_stage, is_encoded):
    granted = GrantedHolds()
    assert not granted.is_on
    stated = _metadata(4096, 8192, is_encoded=is_encoded)
    granted.learn({(0, rank) if by_stage else rank: one for rank, one in enumerate(stated)})
    assert granted.is_on
    assert not any(message_on(one) for one in stated), "another connector's are not these"

    granted.grant("a")
    told = granted.news()
    hold = read_hold(str(granted.hold("a")))
    assert hold is not None
    assert not {4096, 8192}.intersection(hold.tables), "clients see no address"
    masks = mask_of(_agent(0)), mask_of(_agent(1))
    assert [table ^ mask for table, mask in zip(hold.tables, masks, strict=True)] == [4096, 8192]
    assert told == {HOLDS: {"a": hold.generation}}
    assert granted.news() == {}


@pytest.mark.parametrize(
    "places",
    [
        {0: 4096, 1: None},
        {(0, 0): 4096, (1, 0): 8192},
        {(0, 0): 4096, (0, 1): 8192, (1, 0): 1, (1, 1): 2},
        {0: None},
        {},
    ],
    ids=["one without", "two stages", "two of two", "none", "nobody"],
)
def test_nothing_is_granted_where_a_rank_could_not_be_asked(places):
    granted = GrantedHolds()
    granted.learn(dict(zip(places, _metadata(*places.values()), strict=True)))
    assert not granted.is_on


def test_every_grant_is_another_word():
    granted = GrantedHolds()
    granted.learn({0: _metadata(4096)[0]})
    granted.grant("a")
    granted.grant("a")  # it was preempted, and has got other blocks
    first, second = read_hold(str(granted.hold("a"))), read_hold(str(granted.hold("a")))
    assert first is not None
    assert second is not None
    assert first.generation < second.generation
    granted.grant("b")
    granted.withdraw("b")
    granted.withdraw("of nobody")
    assert granted.news() == {HOLDS: {"a": second.generation, "b": 0}}
    other_start = GrantedHolds()
    other_start.learn({0: _metadata(4096)[0]})
    again = read_hold(str(other_start.hold("a")))
    assert again is not None
    assert again.generation >> 32 != first.generation >> 32
