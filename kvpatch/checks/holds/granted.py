"""The holds that a scheduler grants: one for each request that another engine will read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from kvpatch.checks.holds.hold import Hold
from kvpatch.checks.holds.hold_table import generation_of
from kvpatch.transfer.nixl import mask_of

_CHANGES = "kvpatch_hold_changes"
_TABLE = "_kvpatch_hold_table"


class GrantedHolds:
    """One scheduler's.

    A hold is granted when a request gets its blocks: its workers have written it down long
    before anybody can read them. The word is the engine's, of a start of it: what an earlier one
    has said is never taken for this one's.
    """

    def __init__(self) -> None:
        self._start = secrets.randbits(32)
        self._count = 0
        #: By request, of those that have not been answered yet.
        self._granted: dict[str, int] = {}
        #: What workers have not been told yet; 0 of a hold that nobody was told of.
        self._changes: dict[str, int] = {}
        #: Where those of the ranks are; empty where one of them has none.
        self._tables: tuple[int, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether its workers can write holds down."""
        return bool(self._tables)

    @property
    def has_news(self) -> bool:
        """Whether workers have to be told something."""
        return bool(self._changes)

    def learn(self, metadata: Mapping[Any, Any]) -> None:
        """Takes where the ranks' tables are out of what the workers state at handshakes.

        Args:
            metadata: by rank; from 0.30 by stage of the pipeline and rank.
        """
        self._tables = tables_of_ranks(metadata, take_table)

    def grant(self, request_id: str) -> None:
        """Books one, in place of an earlier one of the same request."""
        self._count += 1
        generation = generation_of(self._start, self._count)
        self._granted[request_id] = self._changes[request_id] = generation

    def answer(self, request_id: str) -> str:
        """What a request's answer says."""
        if request_id not in self._granted:
            self.grant(request_id)  # D, of blocks that it has loaded and P may read back
        return str(Hold(self._granted.pop(request_id), self._tables))

    def withdraw(self, request_id: str) -> None:
        """Nobody is told of the request's blocks."""
        if self._granted.pop(request_id, None) is not None:
            self._changes[request_id] = 0

    def tell(self, metadata: Any) -> None:
        """Writes what is new onto what the workers are told in a step."""
        if self._changes:
            setattr(metadata, _CHANGES, self._changes)
            self._changes = {}


def tables_of_ranks(
    metadata: Mapping[Any, Any], take: Callable[[Any], int | None]
) -> tuple[int, ...]:
    """Where the tables of all ranks are, masked, for whoever has shaken hands with them.

    Empty where one has none, or nobody says which is read.

    Args:
        metadata: by rank; from 0.30 by stage of the pipeline and rank.
        take: takes a rank's out of what it states.
    """
    found: dict[int, int | None] = {}
    for place, stated in metadata.items():
        stage, rank = place if isinstance(place, tuple) else (0, place)
        address = take(stated)
        if address is not None:
            address ^= mask_of(_agent_metadata(stated))
        # A peer reads the ranks of one stage; of several nobody says which it asks.
        found[rank] = address if stage == 0 and rank not in found else None
    known = [found.get(rank) for rank in range(len(found))]
    return tuple(one for one in known if one) if all(known) else ()


def _agent_metadata(stated: Any) -> bytes:
    """Returns what NIXL says of a worker's agent, as a handshake hands it to peers."""
    encoded = getattr(stated, "agent_metadata_bytes", None)  # from 0.13 on
    if encoded is None:
        found: bytes = stated.agent_metadata
        return found
    import msgspec

    fields: Mapping[str, bytes] = msgspec.msgpack.decode(encoded)
    return fields["agent_metadata"]


def changes_in(metadata: Any) -> Mapping[str, int]:
    """By request the word of a new hold, 0 of one that is over, as a step's metadata has them."""
    found: Mapping[str, int] = getattr(metadata, _CHANGES, {})
    return found


def state_table(metadata: Any, address: int) -> None:
    """Writes where a worker's table is onto what it states at handshakes, for its scheduler."""
    setattr(metadata, _TABLE, address)


def take_table(metadata: Any) -> int | None:
    """Takes it off again, so that what peers are sent is the release's own."""
    found: int | None = vars(metadata).pop(_TABLE, None)
    return found
