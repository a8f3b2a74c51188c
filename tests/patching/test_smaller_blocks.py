"""Peers of smaller blocks where the release pairs them: which of P's blocks it is handed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch.core.errors import PeerRefused, ReadRefused, UnlikePrompts
from kvpatch.core.releases import FACTS
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.segments import BlockList, kernel_blocks
from kvpatch.load.nixl_proxy import ReadingAgent
from kvpatch.load.read_dispatch import Blocks, remote_slice, request_read
from kvpatch.load.read_request import _READ_REQUEST, ReadRequest
from kvpatch.load.reader import Loads
from kvpatch.peer.decision import decide
from kvpatch.peer.unread_caches import UnreadCache, why_misread
from kvpatch.transfer.checked_transfer import CheckedTransfer
from kvpatch.transfer.lease import Leases
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.state import worker_state

from .test_remote_geometry import stating

_ATTENTION = (Group(frozenset("a"), window_tokens=0),)


def _as_the_release_pairs(
    local: int, remote: int, ours: Blocks, theirs: Blocks, *, from_front: bool
) -> tuple[int, int]:
    """(P's first kernel block of those that are paired, how many), as every release has it."""
    mapped = local * ours.parts * (ours.kernel_tokens // theirs.kernel_tokens)
    held = remote * theirs.parts
    count = min(mapped, held)
    return (0 if from_front else held - count), count


def _listed(blocks: int, first_token: int, of: Blocks) -> BlockList:
    return BlockList(kernel_blocks(range(blocks), 1), of.tokens, first_token)


@given(
    tokens=st.integers(1, 700),
    hit_blocks=st.integers(0, 6),
    ratio=st.integers(1, 4),
    parts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    from_front=st.booleans(),
)
def test_what_is_left_is_paired_by_token(
    tokens: int, hit_blocks: int, ratio: int, parts: tuple[int, int], from_front: bool
) -> None:
    ours, theirs = Blocks(16 * ratio, parts[0]), Blocks(16, parts[1])
    local = -(-tokens // ours.tokens) - hit_blocks
    if local < 1:
        return
    first = hit_blocks * ours.tokens
    remote = -(-tokens // theirs.tokens)

    kept = remote_slice(
        _listed(local, first, ours), _listed(remote, 0, theirs), from_front=from_front
    )

    if kept is None:  # only where no list of whole blocks of P's would do
        assert ours.tokens % theirs.tokens
        return
    start, stop = kept
    skipped, count = _as_the_release_pairs(local, stop - start, ours, theirs, from_front=from_front)
    begins = start * theirs.tokens + skipped * theirs.kernel_tokens
    assert begins == first
    assert begins + count * theirs.kernel_tokens >= tokens


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((3, 0, 64), (5, 0, 32), (0, 5)),  # a list that need not change
        ((1, 0, 96), (3, 64, 64), None),  # blocks that do not meet
        ((1, 96, 96), (3, 0, 64), None),
    ],
)
def test_lists(
    ours: tuple[int, int, int], theirs: tuple[int, int, int], expected: tuple[int, int] | None
) -> None:
    local, remote = (_listed(n, first, Blocks(size, 1)) for n, first, size in (ours, theirs))

    assert remote_slice(local, remote, from_front=False) == expected


# --- a request ------------------------------------------------------------------


class _Agent:
    def __init__(self) -> None:
        self.told: list[tuple[str, bytes]] = []

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        self.told.append((name, notif_msg))

    def make_prepped_xfer(self, *_: Any, **__: Any) -> str:
        return "a transfer"


def _worker(dcp_size: int = 1) -> Any:
    """A stand-in of 0.32's worker."""
    booked = SimpleNamespace(
        remote_dcp_size=1, remote_block_size=32, remote_physical_blocks_per_logical=1
    )
    found = SimpleNamespace(
        block_size=64,
        _physical_blocks_per_logical_kv_block=1,
        dcp_size=dcp_size,
        transfer_topo=SimpleNamespace(get_engine_info=lambda _: booked),
        use_mla=True,
        kv_cache_layout="HND",
        nixl_wrapper=_Agent(),
        dst_xfer_side_handles={"P": {0: "handle"}},
        _remote_agents={"P": {(0, 0): "agent of P"}},
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        ),
    )
    state = worker_state(found)
    state.facts = FACTS["0.32.0"]
    loads = Loads(Leases, lambda notifications: notifications, state.book)
    state.hold(loads)
    found.nixl_wrapper = ReadingAgent(found.nixl_wrapper, loads, None, found)
    return found


def _meta(local: list[int], remote: list[int], tokens: int | None) -> Any:
    found = SimpleNamespace(
        local_block_ids=[local],
        local_num_computed_blocks=(),
        remote=SimpleNamespace(engine_id="P", block_ids=[remote]),
    )
    if tokens is not None:
        setattr(
            found, _READ_REQUEST, ReadRequest(tokens, tokens, (tuple(local),), (tuple(remote),))
        )
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "context_ranks", "meta", "named", "reason"),
    [
        # 97 to 192 tokens, in blocks of 64 two or three
        (Blocks(64, 1), Blocks(48, 2), 1, _meta([1], [10, 11], None), 1, "ENABLE_KVPATCH"),
        (Blocks(64, 1), Blocks(32, 1), 2, _meta([1], [10, 11], 60), 6, "context parallelism"),
        (Blocks(48, 2), Blocks(32, 2), 1, _meta([1], [10, 11, 12], 150), 2, "--block-size"),
    ],
)
def test_a_request_that_cannot_be_paired_fails_alone_and_p_is_told(
    ours: Blocks, theirs: Blocks, context_ranks: int, meta: Any, named: int, reason: str
) -> None:
    """It names as many blocks as have the release prepare a transfer."""
    worker = _worker(dcp_size=context_ranks)
    own, booked = worker.nixl_wrapper.__wrapped__, worker.transfer_topo.get_engine_info("P")
    worker.block_size, worker._physical_blocks_per_logical_kv_block = ours
    booked.remote_block_size, booked.remote_physical_blocks_per_logical = theirs
    spec = SimpleNamespace(kv_cache_specs=None, block_size=ours.tokens)
    worker.kv_cache_config = SimpleNamespace(
        transfer_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)]
    )
    with request_read(worker, "request", meta):
        count = len(meta.remote.block_ids[0])
        with pytest.raises(ReadRefused, match=reason):
            worker.nixl_wrapper.make_prepped_xfer("READ", 1, [0], "handle", [0] * count, b"req:1")
    assert own.told == [("agent of P", b"req:1")]
    assert count == named


@pytest.mark.parametrize("block_tokens", [64, 16])
def test_a_load_that_is_to_fail_fails(block_tokens: int) -> None:
    """What it would load or compute is no prompt of D's."""
    worker, meta = _worker(), _meta([1, 2, 3], [10, 11, 12], 150)
    worker.dst_region_group_ids, worker.region_group_ids = {"P": [0]}, [0]
    read = ReadRequest(150, 150, ((1, 2, 3),), ((10, 11, 12),), is_to_fail=True)
    setattr(meta, _READ_REQUEST, read)
    spec = SimpleNamespace(kv_cache_specs=None, block_size=64)
    worker.kv_cache_config = SimpleNamespace(
        transfer_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)]
    )
    worker.transfer_topo.get_engine_info("P").remote_block_size = block_tokens

    with request_read(worker, "request", meta), pytest.raises(ReadRefused, match="no content"):
        worker.nixl_wrapper.make_prepped_xfer("READ", 1, [0], "handle", [0], b"req:1")


@pytest.mark.parametrize("theirs", [[0, 0, 1], [0, 0, 0]])
def test_a_refused_load_keeps_lists_that_the_release_alone_pairs(theirs: list[int]) -> None:
    """Of other lists it may prepare no transfer, and take the load for done (0.29 and later)."""
    worker, meta = _worker(), _meta([1], [10, 11, 12], 150)
    worker.dst_region_group_ids, worker.region_group_ids = {"P": theirs}, [0, 0, 0]
    worker.transfer_topo.get_engine_info("P").remote_block_size = 64
    refusal = ReadRefused("made up", "nothing")
    loads = worker_state(worker).of(Loads)
    loads.check_makers = (lambda context, _: setattr(context, "refusal", refusal),)

    with request_read(worker, "request", meta):
        kept = meta.remote.block_ids

    assert (kept == [[10, 11, 12]]) == (theirs != worker.region_group_ids)


@pytest.mark.parametrize(
    ("theirs", "sizes", "stated", "tokens", "is_refused"),
    [
        ([0, 0, 1], [64], None, 64, True),
        ([0, -1, 1], [64], 150, 64, True),  # a region that groups share
        ([0, 0, 1], [64], 150, 64, False),  # paired by token
        ([0, 0, 1], [64], None, 150, False),  # all of it
        ([0, 0, 1], [64], None, 130, False),  # it ends in P's last block
        ([0, 0, 1], [64, 16], None, 130, True),  # in one group it does not
        ([0, 0, 1], [256], None, 64, False),
    ],
)
def test_a_part_of_unlike_regions(
    theirs: list[int],
    sizes: list[int],
    stated: int | None,
    tokens: int,
    is_refused: bool,  # noqa: FBT001
) -> None:
    """The release would load the last blocks of P's longer prompt."""
    worker, meta = _worker(), _meta([1], [10, 11, 12], tokens)
    read = ReadRequest(tokens, 150, ((1,),), ((10, 11, 12),))
    setattr(meta, _READ_REQUEST, read)
    meta.remote.num_tokens = stated
    worker.dst_region_group_ids, worker.region_group_ids = {"P": theirs}, [0, 0, 0]
    worker.vllm_config.cache_config.block_size = 64  # of each group its own counts
    worker.kv_cache_config = SimpleNamespace(
        transfer_groups=[
            SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes
        ]
    )
    worker.transfer_topo.get_engine_info("P").remote_block_size = 64

    with request_read(worker, "request", meta):
        prepare = partial(worker.nixl_wrapper.make_prepped_xfer, "READ", 1, [0], "handle", [0])
        if is_refused:
            with pytest.raises(UnlikePrompts, match="other cache groups"):
                prepare(b"req:1")
        else:
            assert isinstance(prepare(b"req:1"), CheckedTransfer)


# --- a peer ---------------------------------------------------------------------


def test_keys_by_column_are_never_read_as_rows() -> None:
    asked: Any = SimpleNamespace(
        worker=_worker(),
        facts=FACTS["0.20.1"],
        context_sizes=(1, 1),
        key_order=lambda: KeyOrder.COLUMN_MAJOR,
        stated_layout="HND",
    )
    local = UnreadCache(64, 1, "HND", "", misreads_smaller=why_misread(asked, 1))

    decided = decide(local, stating(1, 16, "HND"), FACTS["0.20.1"])

    assert isinstance(decided, PeerRefused) and "by column" in decided.reason
