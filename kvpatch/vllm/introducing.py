"""Which engines a scheduler loads from, where handshakes do not say all of a peer's blocks.

A worker finds out what a handshake leaves open from a prompt that D computes itself
(:mod:`kvpatch.vllm.proofs`). So the scheduler has D compute an engine's prompts until all
workers have announced that they can read it; P is told of each, as of a full prefix hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from kvpatch.core import settings
from kvpatch.vllm.likeness import reserves_slots
from kvpatch.vllm.recent import Recent

#: On what a worker has its scheduler hand to peers, and nowhere on the wire.
_MAY_LEAVE_OPEN = "kvpatch_may_leave_open"


class Introductions:
    """The engines that all workers can read.

    Args:
        block_tokens: of our own blocks.
        full_blocks_only: whether no partial block is moved (0.10.0).
        allows_none: whether nothing is to be loaded from anybody.
        declared: the tokens of every peer's blocks, where the operator says all that handshakes
            leave open.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        full_blocks_only: bool = False,
        allows_none: bool = False,
        declared: int | None = None,
    ) -> None:
        self._declared = declared
        self._block_tokens = block_tokens
        self._full_blocks_only = full_blocks_only
        self._allows_none = allows_none
        self._known = Recent[int]()

    def prove(self, engine_id: str, block_tokens: int) -> None:
        """Books that all workers can read an engine.

        Args:
            block_tokens: of its blocks; 0 for as many as ours.
        """
        self._known[engine_id] = block_tokens or self._block_tokens

    def allow(self, engine_id: str, blocks: int, needed_tokens: int) -> bool:
        """Whether a prompt may be loaded of which an engine names some blocks.

        Args:
            needed_tokens: up to where it would be loaded.
        """
        tokens = self._known.get(engine_id, self._declared)
        if tokens is None or self._allows_none or not blocks:
            return False
        return not self._full_blocks_only or blocks * tokens >= needed_tokens


_INTRODUCTIONS: WeakKeyDictionary[Any, Introductions | None] = WeakKeyDictionary()


def introductions_of(scheduler: Any, *, full_blocks_only: bool) -> Introductions | None:
    """A scheduler's; None where handshakes leave nothing open that its workers would have
    to prove.

    0.10.0 loads a prompt into whole blocks and one more for drafted tokens: it takes the
    last blocks of P's for these, a block off, or ends.
    """
    if scheduler not in _INTRODUCTIONS:
        _INTRODUCTIONS[scheduler] = Introductions(
            scheduler.block_size,
            full_blocks_only=full_blocks_only,
            allows_none=full_blocks_only and reserves_slots(scheduler.vllm_config),
            declared=_declared(states_layout=not full_blocks_only),
        )
    return _INTRODUCTIONS[scheduler]


def _declared(*, states_layout: bool) -> int | None:
    """The tokens of every peer's blocks, where nothing is left open beside."""
    has_layout = states_layout or settings.peer_layout() or settings.unstated_layout() == "same"
    return settings.peer_block_size() if has_layout else None


def book_proof(scheduler: Any, engine_id: str, block_tokens: int) -> None:
    """Books that all workers of a scheduler can read an engine."""
    found = _INTRODUCTIONS.get(scheduler)
    if found is not None:
        found.prove(engine_id, block_tokens)


def say_what_is_open(worker: Any, *, may_leave_open: bool) -> None:
    """Has the worker's scheduler know whether peers' handshakes may leave something open.

    A worker without kvpatch says nothing, and could prove nothing: what it would read wrongly it
    cannot unpickle (:mod:`kvpatch.vllm.elsewhere`), and the rest is not kept from it.
    """
    metadata = getattr(worker, "xfer_handshake_metadata", None)  # from 0.11.1
    if metadata is not None:
        setattr(metadata, _MAY_LEAVE_OPEN, may_leave_open)


def hear_what_is_open(scheduler: Any, metadata: Iterable[Any]) -> None:
    """Books what :func:`say_what_is_open` has said, of all workers."""
    said = [vars(one).pop(_MAY_LEAVE_OPEN, False) for one in metadata]
    if said and not any(said):
        _INTRODUCTIONS[scheduler] = None
