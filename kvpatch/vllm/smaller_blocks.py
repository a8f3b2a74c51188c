"""Peers of smaller blocks that the release reads itself, since no reader of ours can.

It pairs blocks by their places in two lists. A list of D's begins behind a prefix hit and one of
P's with the prompt, so that the two belong together from the end, and they end in one place only
where the prompt fills D's last block. Handed P's blocks from D's first token on, the release pairs
them rightly. A request for which there is no such list fails alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import wrapt

from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import KeyOrder
from kvpatch.transfer.nixl import errors_of
from kvpatch.vllm import orders
from kvpatch.vllm.groups import Group
from kvpatch.vllm.registration import Registration
from kvpatch.vllm.shares import ReadRefused

_LOG = logging.getLogger("kvpatch.unlike_engines")

_ADVICE = "use one --block-size on both sides"


@dataclass(frozen=True)
class Blocks:
    """One side's blocks.

    Attributes:
        kernel_tokens: of a kernel block.
        parts: kernel blocks in one of the blocks that ids count.
    """

    kernel_tokens: int
    parts: int

    @property
    def tokens(self) -> int:
        """Of one of the blocks that ids count."""
        return self.kernel_tokens * self.parts


@dataclass(frozen=True)
class Listed:
    """A list of blocks, and the token of the prompt that it begins with."""

    blocks: int
    first_token: int


def remote_slice(
    local: Listed, remote: Listed, ours: Blocks, theirs: Blocks, *, from_front: bool
) -> tuple[int, int] | None:
    """The part of P's list that the release pairs with D's token by token; None for none.

    Args:
        from_front: whether it pairs lists of unlike lengths from the front (recurrent state and
            blocks cut into unlike parts), and not from the end.
    """
    before = local.first_token - remote.first_token
    if before < 0 or before % theirs.tokens:
        return None
    start = before // theirs.tokens
    stop = min(remote.blocks, start - -local.blocks * ours.tokens // theirs.tokens)
    paired = (stop - start) * theirs.tokens
    if stop <= start or (paired > local.blocks * ours.tokens and not from_front):
        return None
    return start, stop


# --- at the handshake ---------------------------------------------------------


def why_misread(worker: Any, registration: Registration, facts: ReleaseFacts) -> str:
    """Why the release puts wrong bytes into larger blocks, whatever the request; empty: no."""
    if registration.key_order(worker) is not KeyOrder.ROW_MAJOR:
        return "takes keys that the backend keeps by column for rows"
    contexts = getattr(worker.vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if contexts > 1 and not facts.states_context_parallelism:
        return "does not know that ranks share out the tokens of a block"
    if worker.use_mla or facts.pairs_heads_by_layout:
        return ""
    if facts.cache_shape != "keys first":
        return "puts heads in wrong places of larger blocks (0.23 to 0.31)"
    return "" if worker.kv_cache_layout == "HND" else "takes NHD for HND in larger blocks"


# --- at a request -------------------------------------------------------------


def smaller_blocks(worker: Any, engine_id: str) -> tuple[Blocks, Blocks | None] | None:
    """Our blocks, and those of a peer that has smaller ones as the release has booked it.

    None for any other peer. Theirs are None where nobody knows into what they are cut.
    """
    own_tokens = getattr(worker, "block_size", None)  # missing in workers of vLLM's own tests
    if own_tokens is None or engine_id not in worker._remote_agents:
        return None
    topology = getattr(worker, "transfer_topo", None)
    parts: int | None = None
    if topology is not None:  # from 0.20
        booked = topology.get_engine_info(engine_id)
        tokens, parts = booked.remote_block_size, booked.remote_physical_blocks_per_logical
    elif getattr(worker, "kv_topo", None) is not None:  # from 0.11.1
        tokens = worker.kv_topo.remote_block_size[engine_id]
    else:
        return None
    if tokens >= own_tokens:
        return None
    ours = Blocks(own_tokens, worker._physical_blocks_per_logical_kv_block)
    if parts is None and ours.parts == 1:
        parts = 1
    return ours, None if parts is None else Blocks(tokens, parts)


@contextmanager
def paired(
    worker: Any, meta: Any, groups: Sequence[Group], ours: Blocks, theirs: Blocks | None
) -> Iterator[None]:
    """While inside, the release reads a request of a peer of smaller blocks, or fails it."""
    try:
        mend_pairing(worker, meta, groups, ours, theirs)
    except ReadRefused as error:
        orders.show_remote_blocks(meta, _preparable(worker, meta, groups, ours, theirs))
        with _refusing(worker, orders.engine_of(meta), error):
            yield
    else:
        yield


def mend_pairing(
    worker: Any, meta: Any, groups: Sequence[Group], ours: Blocks, theirs: Blocks | None
) -> None:
    """Leaves those of P's blocks on a request that the release pairs with D's.

    Raises:
        ReadRefused: there are no such blocks, or nobody can tell.
    """
    local, remote = map(orders.groups, (meta.local_block_ids, orders.remote_blocks(meta)))
    if not any(local):
        return
    if theirs is None:
        raise ReadRefused(
            "this release's handshake does not say into what the peer's blocks are cut, and ours "
            f"are: {_ADVICE}"
        )
    if _shares_tokens(worker, orders.engine_of(meta)):
        _refuse_unlike_shares(meta, local, remote)
        return
    lists = _Lists(worker, orders.order_of(meta), groups, local, remote, ours, theirs)
    from_front = ours.parts != theirs.parts and any(group.has_state for group in groups)
    kept = list(remote)
    for number, group in enumerate(groups):
        if group.has_state or not local[number]:
            continue
        found = remote_slice(
            lists.local_list(number), lists.remote_list(number), ours, theirs, from_front=from_front
        )
        if found is None:
            raise ReadRefused(
                f"this vLLM would pair the {len(remote[number])} blocks of {theirs.tokens} tokens "
                f"with the wrong ones of our {len(local[number])} of {ours.tokens}: {_ADVICE}"
            )
        kept[number] = lists.without_freed(number)[slice(*found)]
    if tuple(kept) != remote:
        orders.show_remote_blocks(meta, kept)


@dataclass(frozen=True)
class _Lists:
    """The two lists of each group of a request."""

    worker: Any
    order: orders.Order | None
    groups: Sequence[Group]
    local: tuple[tuple[int, ...], ...]
    remote: tuple[tuple[int, ...], ...]
    ours: Blocks
    theirs: Blocks

    def local_list(self, number: int) -> Listed:
        """Ours: it ends with the prompt's last token.

        Raises:
            ReadRefused: its first token is not known.
        """
        held = len(self.local[number])
        if not self.groups[number].window_tokens:
            cache = self.worker.vllm_config.cache_config
            if not cache.enable_prefix_caching:
                return Listed(held, 0)
            if self.order is not None and self.order.hit_tokens is not None:
                whole = self.order.hit_tokens // self.ours.tokens
                return Listed(held, whole * self.ours.tokens)
        first = (self._blocks_in_all(number) - held) * self.ours.tokens
        if first < 0:
            raise ReadRefused(f"{held} blocks of {self.ours.tokens} tokens are more than it fills")
        return Listed(held, first)

    def remote_list(self, number: int) -> Listed:
        """P's, without blocks that slid out of a window."""
        blocks = len(self.without_freed(number))
        if not self.groups[number].window_tokens:
            return Listed(blocks, 0)
        if self.order is None:
            raise ReadRefused(_NO_COUNT)
        ends = -(-self.order.remote_tokens // self.theirs.tokens)
        return Listed(blocks, (ends - blocks) * self.theirs.tokens)

    def without_freed(self, number: int) -> tuple[int, ...]:
        """P's ids, from the first block on that its window has."""
        found = self.remote[number]
        if not self.groups[number].window_tokens:
            return found
        freed = next((i for i, block in enumerate(found) if block), len(found))
        return found[freed:]

    def _blocks_in_all(self, number: int) -> int:
        """How many blocks of ours the prompt fills."""
        if self.order is not None:
            return -(-self.order.tokens // self.ours.tokens)
        if self.groups[number].window_tokens:
            raise ReadRefused(_NO_COUNT)
        last = len(self.remote[number]) * self.theirs.tokens
        # P may leave out the last token of a model with recurrent state.
        least = last - self.theirs.tokens + (not any(group.has_state for group in self.groups))
        if -(-least // self.ours.tokens) != -(-last // self.ours.tokens):
            raise ReadRefused(_NO_COUNT)
        return -(-last // self.ours.tokens)


_NO_COUNT = (
    "the request reads from blocks of another size and carries no token count: set ENABLE_KVPATCH "
    "for the scheduler's process too"
)


def _shares_tokens(worker: Any, engine_id: str) -> bool:
    """Whether ranks of either side share out tokens (decode context parallelism, from 0.29)."""
    if getattr(worker, "dcp_size", 1) > 1:
        return True
    topology = getattr(worker, "transfer_topo", None)
    booked = topology.get_engine_info(engine_id) if topology is not None else None
    return getattr(booked, "remote_dcp_size", 1) > 1


def _refuse_unlike_shares(
    meta: Any, local: tuple[tuple[int, ...], ...], remote: tuple[tuple[int, ...], ...]
) -> None:
    """There the release pairs blocks one to one, smaller ones too, and leaves out the rest.

    Raises:
        ReadRefused: P has more blocks than D, or D has some already.
    """
    has_hit = any(meta.local_num_computed_blocks)
    if has_hit or any(len(theirs) > len(ours) for ours, theirs in zip(local, remote, strict=False)):
        raise ReadRefused(
            "with context parallelism this vLLM pairs the peer's smaller blocks one to one with "
            f"ours: {_ADVICE}"
        )


# --- failing one request --------------------------------------------------------


class _RefusingAgent(wrapt.ObjectProxy[Any]):
    """Raises where the release prepares a transfer: there it makes one failed load of it."""

    def __init__(self, agent: Any, worker: Any, engine_id: str, error: ReadRefused) -> None:
        super().__init__(agent)
        self._self_worker = worker
        self._self_engine_id = engine_id
        self._self_error = error

    def make_prepped_xfer(
        self,
        operation: str,
        local_handle: Any,
        local_indices: Any,
        remote_handle: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Raises:
        ReadRefused: always; P is told that nobody will read its blocks.
        """
        for name in _agents_behind(self._self_worker, self._self_engine_id, remote_handle):
            try:
                self.__wrapped__.send_notif(name, notif_msg=notif_msg)
            except errors_of(self.__wrapped__) as error:
                _LOG.warning("%s was not told that a request is over: %s", name, error)
        raise self._self_error


def _preparable(
    worker: Any, meta: Any, groups: Sequence[Group], ours: Blocks, theirs: Blocks | None
) -> list[list[int]]:
    """As many blocks of P's, all of them block 0, as have the release prepare a transfer."""
    ratio = 1.0 if theirs is None else ours.tokens / theirs.tokens
    shares = getattr(worker, "dcp_size", 1)
    in_front = max(getattr(meta, "local_num_computed_blocks", ()), default=0) + 1
    lengths = []
    for group, local in zip(groups, orders.groups(meta.local_block_ids), strict=True):
        length = len(local) if group.has_state else math.ceil(len(local) * ratio)
        if _shares_tokens(worker, orders.engine_of(meta)):
            length = (length + in_front) * shares
        lengths.append(length)
    return [[0] * length for length in lengths]


@contextmanager
def _refusing(worker: Any, engine_id: str, error: ReadRefused) -> Iterator[None]:
    agent = worker.nixl_wrapper
    worker.nixl_wrapper = _RefusingAgent(agent, worker, engine_id, error)
    try:
        yield
    finally:
        worker.nixl_wrapper = agent


def _agents_behind(worker: Any, engine_id: str, handle: Any) -> list[str]:
    """NIXL's names of the ranks that a handle of prepared descriptors stands for."""
    handles = worker.dst_xfer_side_handles[engine_id]
    agents = worker._remote_agents[engine_id]
    if not isinstance(handles, Mapping):  # to 0.13: one rank
        return list(agents.values())
    ranks = [rank for rank, found in handles.items() if found == handle]
    names = (agents.get(rank, agents.get((0, rank))) for rank in ranks)  # pairs from 0.27
    return [name for name in names if name is not None]
