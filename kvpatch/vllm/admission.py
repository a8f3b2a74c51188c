"""A peer of another geometry at the handshake: shown to the release as one like us, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvpatch._text import one_line, shown
from kvpatch.vllm.head_shares import heads_as_if_unshared, heads_called
from kvpatch.vllm.host_buffer_worker import buffer_of
from kvpatch.vllm.likeness import alike_block_bytes, has_ranks_unmet, is_alike
from kvpatch.vllm.our_side import own_regions
from kvpatch.vllm.peers import OurSide, refusal
from kvpatch.vllm.reader import Reader
from kvpatch.vllm.split_handles import blocks_undivided
from kvpatch.vllm.unstated import BlockTokens
from kvpatch.vllm.wire import Statement, as_alike, hnd_like, of_blocks

_LOG = logging.getLogger("kvpatch.unlike_engines")


def refuse_doubtful_layout(worker: Any, reader: Reader, peer: Statement) -> None:
    """Refuses another layout on devices without storages.

    A stock peer on such a device states the layout that was asked for, and its host buffer has
    the one of its tensors' shapes.

    Raises:
        PeerRefused: it states another layout than ours.
    """
    buffer = buffer_of(worker)
    is_sure = buffer is None or buffer.caches is None
    if not is_sure and peer.layout not in (None, reader.ours.layout):
        raise refusal(
            reader.ours,
            peer,
            "the caches of this device have no storage, and a peer on one like it may have another "
            "layout than it states: set ENABLE_KVPATCH there too",
        )


def is_left_with_state(reader: Reader, peer: Statement) -> bool:
    """Whether a peer of a hybrid model is the release's: it alone splits states over ranks."""
    is_plain = peer.rows is None and not reader.is_for_all
    return reader.has_state and is_plain and peer.tp_size != reader.ours.tp_size


def have_our_parts(worker: Any, ours: OurSide, peer: Statement) -> None:
    """Has 0.20 cut the blocks of a hybrid model's peer as ours are.

    It takes a page for no larger than its states need, which a larger --block-size makes it: it
    then ends even between like engines, by an assertion without a word.
    """
    told = getattr(worker, "_physical_blocks_per_logical", None)
    if isinstance(told, dict):
        told[peer.engine_id] = ours.kernel_blocks_per_block


def refuse_uncounted(ours: OurSide, peer: Statement, unstated: BlockTokens | None) -> None:
    """Refuses a peer whose states lie in pages of a size that its handshake leaves open.

    Raises:
        PeerRefused: how its blocks are cut is not known.
    """
    if unstated is not None:
        raise refusal(
            ours,
            peer,
            f"{ours.backend} may cut its blocks into kernel blocks, a page of recurrent state is "
            "as large as a whole one, and this release's handshake does not state it: use one "
            "--block-size on both sides, or vLLM 0.21 or later",
        )


def add_unlike(
    wrapped: Callable[..., Any],
    worker: Any,
    reader: Reader,
    metadata: Any,
    statement: Statement,
    unstated: BlockTokens | None,
    more: tuple[Any, ...],
) -> Any:
    ours = reader.ours
    if any(size != 1 for size in more):
        raise refusal(ours, statement, "use --decode-context-parallel-size 1 on the prefill side")
    rank = reader.rank(statement)
    with blocks_undivided(worker):
        rank.agent = _add_as_alike(wrapped, worker, reader, metadata, statement, more)
    reader.admit(rank, unstated)
    peer = one_line(f"{shown(statement.engine_id)}: it has {statement}")
    _LOG.info("reading from engine %s; we have %s", peer, ours)
    return rank.agent


def add_unproven(
    wrapped: Callable[..., Any],
    worker: Any,
    reader: Reader,
    metadata: Any,
    statement: Statement,
    unstated: BlockTokens | None,
) -> Any:
    """One that may have either layout; nothing is loaded from it before that is proven."""
    candidates = {name: replace(statement, layout=name) for name in ("HND", "NHD")}
    likes = [name for name, stated in candidates.items() if is_alike(reader.ours, stated)]
    ranks = {name: reader.rank(stated) for name, stated in candidates.items()}
    # The release reads the one that turns out to be like us, any block of it.
    agent = _add_as_alike(wrapped, worker, reader, metadata, statement, (), shows_all=bool(likes))
    for rank in ranks.values():
        rank.agent = agent
    alike = next(iter(likes), None)
    reader.admit_unproven(ranks, None if reader.is_for_all else alike, unstated)
    _LOG.info(
        "engine %s states no layout, and is not read before prompts have shown it: it has %s; we "
        "have %s",
        shown(statement.engine_id),
        one_line(statement),
        reader.ours,
    )
    return agent


def _add_as_alike(
    wrapped: Callable[..., Any],
    worker: Any,
    reader: Reader,
    metadata: Any,
    statement: Statement,
    more: tuple[Any, ...],
    *,
    shows_all: bool = False,
) -> Any:
    """Shows the release a peer like us, within the memory of this one; its name to NIXL.

    Args:
        shows_all: whether the release may come to read it, and not one block's worth of it for
            its books: it makes descriptors of all that it is shown.
    """
    ours = reader.ours
    layout = hnd_like(ours.layout)
    alike = as_alike(
        metadata,
        statement,
        block_tokens=ours.block_tokens,
        kernel_blocks_per_block=ours.kernel_blocks_per_block,
        layout=layout,
        block_bytes=alike_block_bytes(ours, statement),
        own=own_regions(worker),
    )
    if not shows_all:
        alike = of_blocks(alike, ours.kernel_blocks_per_block)
    have_our_parts(worker, ours, statement)
    shown_ranks = ours.tp_size if has_ranks_unmet(ours, statement) else statement.tp_size
    heads = heads_as_if_unshared(ours, statement)
    with layout_called(worker, layout), heads_called(worker, heads):
        return wrapped(alike, statement.tp_rank, shown_ranks, *more)


@contextmanager
def layout_called(worker: Any, layout: str) -> Iterator[None]:
    """While inside, the worker compares its peer's layout with this one.

    The release splits heads over ranks in HND only; ours are split by the plan.
    """
    if not hasattr(worker, "kv_cache_layout"):  # 0.10.0
        yield
        return
    own = worker.kv_cache_layout
    worker.kv_cache_layout = layout
    try:
        yield
    finally:
        worker.kv_cache_layout = own
