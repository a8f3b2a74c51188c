"""A peer of another geometry at the handshake: shown to the release as one like us, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from kvpatch.core.errors import KvpatchError
from kvpatch.core.text import one_line, shown
from kvpatch.geometry import layer_by_layer
from kvpatch.vllm.head_shares import heads_as_if_unshared, heads_called
from kvpatch.vllm.likeness import alike_block_bytes, has_ranks_unmet, is_alike
from kvpatch.vllm.local_geometry import LocalGeometry, own_regions
from kvpatch.vllm.proofs import Name
from kvpatch.vllm.reader import Rank, Reader
from kvpatch.vllm.remote_geometry import refusal
from kvpatch.vllm.split_handles import blocks_undivided
from kvpatch.vllm.state import worker_state
from kvpatch.vllm.wire import PeerRefused, Statement, as_alike, of_blocks

_LOG = logging.getLogger("kvpatch.unlike_engines")


def refuse_doubtful_layout(worker: Any, reader: Reader, peer: Statement) -> None:
    """Refuses another layout on devices without storages.

    A stock peer on such a device states the layout that was asked for, and its host buffer has
    the one of its tensors' shapes.

    Raises:
        PeerRefused: it states another layout than ours.
    """
    buffer = worker_state(worker).host_buffer
    is_sure = (
        buffer is None
        or buffer.caches is None
        or all(layer.has_heads_by_turns for layer in reader.ours.layers.values())
    )
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


def have_our_parts(worker: Any, ours: LocalGeometry, peer: Statement) -> None:
    """Has 0.20 cut the blocks of a hybrid model's peer as ours are.

    It takes a page for no larger than its states need, which a larger --block-size makes it: it
    then ends even between like engines, by an assertion without a word.
    """
    told = getattr(worker, "_physical_blocks_per_logical", None)
    if isinstance(told, dict):
        told[peer.engine_id] = ours.kernel_blocks_per_block


def add_unlike(
    wrapped: Callable[..., Any],
    worker: Any,
    reader: Reader,
    metadata: Any,
    statement: Statement,
    more: tuple[Any, ...],
) -> Any:
    ours = reader.ours
    if any(size != 1 for size in more):
        raise refusal(ours, statement, "use --decode-context-parallel-size 1 on the prefill side")
    rank = reader.rank(statement)
    with blocks_undivided(worker):
        rank.agent = _add_as_alike(wrapped, worker, reader, metadata, statement, more)
    reader.admit(rank)
    peer = one_line(f"{shown(statement.engine_id)}: it has {statement}")
    _LOG.info("reading from engine %s; we have %s", peer, ours)
    return rank.agent


def add_unproven(
    wrapped: Callable[..., Any],
    worker: Any,
    reader: Reader,
    metadata: Any,
    statements: Sequence[Statement],
    check: Callable[[Statement], None],
) -> Any:
    """One that may be several things; nothing is loaded from it before it is proven which.

    Args:
        check: refuses a candidate that is unlike us, where it cannot be read.

    Raises:
        PeerRefused: it cannot be read as any of them.
    """
    ranks: dict[Name, Rank] = {}
    refusals: dict[Name, KvpatchError] = {}
    alike: Name | None = None
    for statement in statements:
        name = _name_of(statement, statements)
        try:
            is_like = is_alike(reader.ours, statement) and not reader.reads_all
            if not is_like:
                check(statement)
            ranks[name] = reader.rank(statement)
        except PeerRefused as error:
            refusals[name] = error
            continue
        if is_like:
            alike = name
    if not ranks:
        raise next(iter(refusals.values()))
    first = next(iter(ranks.values())).statement
    if isinstance(alike, int):  # how its blocks are cut is all that is open
        have_our_parts(worker, reader.ours, first)
        agent = wrapped(metadata, first.tp_rank, first.tp_size)
    else:
        # The release reads the one that turns out to be like us, any block of it.
        shows_all = alike is not None
        with nullcontext() if shows_all else blocks_undivided(worker):
            agent = _add_as_alike(wrapped, worker, reader, metadata, first, (), shows_all=shows_all)
    for rank in ranks.values():
        rank.agent = agent
    reader.admit_unproven(ranks, refusals, alike)
    _LOG.info(
        "engine %s does not state all of its blocks, and is not read before a prompt has shown "
        "it: it has %s, or one of %d; we have %s",
        shown(first.engine_id),
        one_line(first),
        len(statements),
        reader.ours,
    )
    return agent


def _name_of(statement: Statement, among: Sequence[Statement]) -> Name:
    if len({one.layout for one in among}) > 1:
        return str(statement.layout)
    if len(among) > 1:
        return int(statement.kernel_blocks_per_block or 1)
    return "stated"


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
    layout = layer_by_layer("HND", like=ours.layout)
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
