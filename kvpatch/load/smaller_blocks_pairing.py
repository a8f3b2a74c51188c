"""The choice of P's smaller blocks that a request gets, to be paired with D's by token.

The release pairs blocks by their places in two lists. A list of D's begins behind a prefix hit and
one of P's with the prompt, so that the two belong together from the end, and they end in one place
only where the prompt fills D's last block. Handed P's blocks from D's first token on, the release
pairs them rightly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from kvpatch.core.errors import KvpatchError, ReadRefused, UnexpectedRead
from kvpatch.core.proxies import ObjectProxy, replaced
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load import read_request
from kvpatch.load.smaller_blocks import ADVICE, Blocks, shares_tokens
from kvpatch.load.transfer_handles import booked_ranks
from kvpatch.transfer.nixl import tell_over
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.state import worker_state


@dataclass(frozen=True)
class Listed:
    """A list of blocks, and the token of the prompt that it begins with."""

    blocks: int
    first_token: int


def remote_slice(
    local: Listed, remote: Listed, ours: Blocks, theirs: Blocks, *, from_front: bool
) -> tuple[int, int] | None:
    """Returns the part of P's list that the release pairs with D's token by token; None for none.

    Args:
        from_front: True if it pairs lists of unlike lengths from the front (recurrent state and
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


@dataclass(frozen=True)
class Pairing:
    """A peer of smaller blocks.

    Attributes:
        theirs: its blocks; None where nobody knows into what they are cut.
    """

    engine_id: str
    groups: Sequence[Group]
    ours: Blocks
    theirs: Blocks | None
    facts: ReleaseFacts


def mend_pairing(worker: Any, meta: Any, pairing: Pairing) -> None:
    """Leaves those of P's blocks on a request that the release pairs with D's, or refuses it."""
    groups, ours, theirs, facts = pairing.groups, pairing.ours, pairing.theirs, pairing.facts
    local, remote = map(
        read_request.groups, (meta.local_block_ids, read_request.remote_blocks(meta, facts))
    )
    if not any(local):
        return
    if theirs is None:
        raise ReadRefused(
            "this release's handshake does not say into what the peer's blocks are cut, and ours "
            "are",
            ADVICE,
        )
    if shares_tokens(worker, pairing.engine_id, facts):
        _refuse_unlike_shares(meta, local, remote)
        return
    lists = _Lists(worker, read_request.read_request_of(meta), groups, local, remote, ours, theirs)
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
                f"with the wrong ones of our {len(local[number])} of {ours.tokens}",
                ADVICE,
            )
        kept[number] = lists.without_freed(number)[slice(*found)]
    if tuple(kept) != remote:
        read_request.replace_remote_blocks(meta, kept, facts)


@dataclass(frozen=True)
class _Lists:
    """The two lists of each group of a request."""

    worker: Any
    request: read_request.ReadRequest | None
    groups: Sequence[Group]
    local: tuple[tuple[int, ...], ...]
    remote: tuple[tuple[int, ...], ...]
    ours: Blocks
    theirs: Blocks

    def local_list(self, number: int) -> Listed:
        """Returns D's list, which ends with the prompt's last token."""
        held = len(self.local[number])
        if not self.groups[number].window_tokens:
            cache = self.worker.vllm_config.cache_config
            if not cache.enable_prefix_caching:
                return Listed(held, 0)
            if self.request is not None and self.request.hit_tokens is not None:
                whole = self.request.hit_tokens // self.ours.tokens
                return Listed(held, whole * self.ours.tokens)
        first = (self._blocks_in_all(number) - held) * self.ours.tokens
        if first < 0:
            raise UnexpectedRead(
                f"{held} blocks of {self.ours.tokens} tokens are more than it fills"
            )
        return Listed(held, first)

    def remote_list(self, number: int) -> Listed:
        """Returns P's list, without blocks that slid out of a window."""
        blocks = len(self.without_freed(number))
        if not self.groups[number].window_tokens:
            return Listed(blocks, 0)
        if self.request is None:
            raise _no_count()
        ends = -(-self.request.remote_tokens // self.theirs.tokens)
        return Listed(blocks, (ends - blocks) * self.theirs.tokens)

    def without_freed(self, number: int) -> tuple[int, ...]:
        """Returns P's ids, from the first block on that its window has."""
        found = self.remote[number]
        if not self.groups[number].window_tokens:
            return found
        freed = next((i for i, block in enumerate(found) if block), len(found))
        return found[freed:]

    def _blocks_in_all(self, number: int) -> int:
        """Returns how many of D's blocks the prompt fills."""
        if self.request is not None:
            return -(-self.request.tokens // self.ours.tokens)
        if self.groups[number].window_tokens:
            raise _no_count()
        last = len(self.remote[number]) * self.theirs.tokens
        # P may leave out the last token of a model with recurrent state.
        least = last - self.theirs.tokens + (not any(group.has_state for group in self.groups))
        if -(-least // self.ours.tokens) != -(-last // self.ours.tokens):
            raise _no_count()
        return -(-last // self.ours.tokens)


def _no_count() -> ReadRefused:
    return ReadRefused(
        "the request reads from blocks of another size and carries no token count",
        "set ENABLE_KVPATCH for the scheduler's process too",
    )


def _refuse_unlike_shares(
    meta: Any, local: tuple[tuple[int, ...], ...], remote: tuple[tuple[int, ...], ...]
) -> None:
    """Refuses unlike lists: here the release pairs blocks one to one, and leaves out the rest."""
    has_hit = any(meta.local_num_computed_blocks)
    if has_hit or any(len(theirs) > len(ours) for ours, theirs in zip(local, remote, strict=False)):
        raise ReadRefused(
            "with context parallelism this vLLM pairs the peer's smaller blocks one to one with "
            "ours",
            ADVICE,
        )


@contextmanager
def paired(worker: Any, meta: Any, pairing: Pairing) -> Iterator[None]:
    """While inside, the release reads a request of a peer of smaller blocks, or fails it."""
    try:
        mend_pairing(worker, meta, pairing)
    except (ReadRefused, UnexpectedRead) as error:
        worker_state(worker).book.refuse(error)
        read_request.replace_remote_blocks(meta, _preparable(worker, meta, pairing), pairing.facts)
        with refusing(worker, pairing.engine_id, error):
            yield
    else:
        yield


class _RefusingAgent(ObjectProxy):
    """Raises where the release prepares a transfer: there it makes one failed load of it."""

    def __init__(self, agent: Any, worker: Any, engine_id: str, error: KvpatchError) -> None:
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
        KvpatchError: always; P is told that nobody will read its blocks.
        """
        ranks = booked_ranks(self._self_worker, self._self_engine_id, remote_handle)
        tell_over(self.__wrapped__, [agent for _, agent in ranks], notif_msg)
        raise self._self_error


def _preparable(worker: Any, meta: Any, pairing: Pairing) -> list[list[int]]:
    """Returns as many times block 0 as have the release prepare a transfer."""
    theirs = pairing.theirs
    ratio = 1.0 if theirs is None else pairing.ours.tokens / theirs.tokens
    lengths = []
    for group, local in zip(pairing.groups, read_request.groups(meta.local_block_ids), strict=True):
        length = len(local) if group.has_state else math.ceil(len(local) * ratio)
        if shares_tokens(worker, pairing.engine_id, pairing.facts):
            in_front = max(meta.local_num_computed_blocks, default=0) + 1
            length = (length + in_front) * worker.dcp_size
        lengths.append(length)
    return [[0] * length for length in lengths]


def refusing(worker: Any, engine_id: str, error: KvpatchError) -> AbstractContextManager[None]:
    """Makes any transfer that the release prepares fail with this error, while inside."""
    agent = _RefusingAgent(worker.nixl_wrapper, worker, engine_id, error)
    return replaced(worker, nixl_wrapper=agent)
