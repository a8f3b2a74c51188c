"""The texts in P's answer that checks read (``kv_transfer_params``), and what they make P do.

``kvpatch_hold`` says that P holds a request's blocks, ``kvpatch_digest`` that each of its ranks
will have a digest of them. Whoever passes the answer on may be a program that knows no whole
numbers over 2**53, so that numbers are hexadecimal and the whole of each is one string.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpatch.checks.tables import generation_of
from kvpatch.core.errors import AS_ANSWERED, NoDigest, ReadRefused
from kvpatch.core.text import shown
from kvpatch.load.read_request import DIGEST, HOLD
from kvpatch.transfer.nixl import mask_of
from kvpatch.worker.envelope import DIGEST_ORDERS, HOLDS, TABLES, message_on

# An address of 60 bits and a slot behind it are a number of 64.
_ADDRESSES = r"([0-9a-f]{1,15}(?:,[0-9a-f]{1,15}){0,1023})"
_HOLD = re.compile(rf"1/([0-9a-f]{{1,16}})/{_ADDRESSES}")
_PROMISE = re.compile(rf"1/{_ADDRESSES}")
_NEWER_FORM = re.compile(r"(?!1/)[0-9]{1,4}/.{0,65536}", re.DOTALL)


@dataclass(frozen=True)
class Hold:
    """A request's, at one engine.

    Attributes:
        generation: the word that stands in the tables of P's ranks while they hold the blocks.
        tables: by rank of P's, where its table of holds begins, masked (``transfer/nixl.py``).
    """

    generation: int
    tables: tuple[int, ...]

    def __str__(self) -> str:
        return f"1/{self.generation:x}/{_text_of(self.tables)}"


def _text_of(tables: Sequence[int]) -> str:
    return ",".join(f"{address:x}" for address in tables)


def _tables_in(text: str) -> tuple[int, ...]:
    return tuple(int(address, 16) for address in text.split(","))


def read_hold(stated: str) -> Hold | None:
    """The hold that P has stated; None of a form that only a newer kvpatch knows.

    Raises:
        ReadRefused: it is no hold of any form.
    """
    found = _HOLD.fullmatch(stated)
    if found is None and not _NEWER_FORM.fullmatch(stated):
        raise ReadRefused(
            f"kv_transfer_params.{HOLD} is {shown(stated)}, which no P says", AS_ANSWERED
        )
    return None if found is None else Hold(int(found[1], 16), _tables_in(found[2]))


def read_promise(stated: str) -> tuple[int, ...] | None:
    """By rank of P's where its table of digests begins, masked; None of a newer form.

    Raises:
        NoDigest: it is no promise of any form.
    """
    found = _PROMISE.fullmatch(stated)
    if found is None and not _NEWER_FORM.fullmatch(stated):
        raise NoDigest(
            f"kv_transfer_params.{DIGEST} is {shown(stated)}, which no P says: pass on all that P "
            "answered, as it is"
        )
    return None if found is None else _tables_in(found[1])


class DigestOrder(NamedTuple):
    """The tokens of a request that is over, of which a worker makes a digest.

    Attributes:
        generation: the word of its hold.
        blocks: as the release has them, from the first token's on; per cache group where it has
            several.
        tokens: that are its own in them.
        named: the blocks that P's answer names, in which D looks for recurrent states.
        held: tokens that the answer says P holds.
    """

    generation: int
    blocks: Any
    tokens: int
    named: Any
    held: int


class GrantedHolds:
    """The holds of one scheduler: one for each request that another engine will read.

    A hold is granted when a request gets its blocks: its workers have written it down long
    before anybody can read them. The word is the engine's, of a start of it: what an earlier one
    has said is never taken for this one's. Digests are promised of what is held.
    """

    def __init__(self) -> None:
        self._start = secrets.randbits(32)
        self._count = 0
        #: By request, of those that have not been answered yet.
        self._granted: dict[str, int] = {}
        #: What workers have not been told yet; 0 of a hold that nobody was told of.
        self._changes: dict[str, int] = {}
        self._orders: dict[str, tuple[Any, ...]] = {}
        #: By field, where those of the ranks are; empty where one of them has none.
        self._tables: dict[str, tuple[int, ...]] = {}

    @property
    def is_on(self) -> bool:
        return bool(self._tables.get(HOLD))

    @property
    def has_news(self) -> bool:
        return bool(self._changes or self._orders)

    def learn(self, metadata: Mapping[Any, Any]) -> None:
        """Takes where the ranks' tables are out of what the workers state at handshakes.

        Args:
            metadata: by rank; from 0.30 by stage of the pipeline and rank.
        """
        # Taken: a MultiConnector hands them to other connectors, whose tables they are not.
        stated = [(at, message_on(one).pop(TABLES, {}), one) for at, one in metadata.items()]
        self._tables = {name: _tables_of_ranks(name, stated) for name in (HOLD, DIGEST)}

    def grant(self, request_id: str) -> None:
        """Books one, in place of an earlier one of the same request."""
        self._count += 1
        generation = generation_of(self._start, self._count)
        self._granted[request_id] = self._changes[request_id] = generation

    def hold(self, request_id: str) -> Hold:
        """Returns what a request's answer says of its hold."""
        if request_id not in self._granted:
            self.grant(request_id)  # D, of blocks that it has loaded and P may read back
        return Hold(self._granted.pop(request_id), self._tables[HOLD])

    def answer(
        self, request: Any, block_ids: Any, params: Mapping[str, Any], held: int
    ) -> dict[str, Any]:
        """Returns a request's answer with what checks read in it, and has digests made."""
        hold = self.hold(request.request_id)
        stated = {**params, HOLD: str(hold)}
        if self._tables[DIGEST]:
            tokens, named = _tokens(request, held), params.get("remote_block_ids") or ()
            order = DigestOrder(hold.generation, block_ids, tokens, named, held)
            self._orders[request.request_id] = tuple(order)
            stated[DIGEST] = f"1/{_text_of(self._tables[DIGEST])}"
        return stated

    def withdraw(self, request_id: str) -> None:
        """Withdraws the hold of a request's blocks: peers find none."""
        if self._granted.pop(request_id, None) is not None:
            self._changes[request_id] = 0

    def news(self, _: Any = None) -> dict[str, Any]:
        """Returns what the workers have not been told yet, for the message of a step."""
        found = {HOLDS: self._changes, DIGEST_ORDERS: self._orders}
        self._changes, self._orders = {}, {}
        return {name: content for name, content in found.items() if content}


def _tokens(request: Any, held: int) -> int:
    """Counts the tokens of a request that D may load, as the side that reads them counts."""
    if (request.kv_transfer_params or {}).get("do_remote_decode"):
        return int(min(held, request.num_prompt_tokens))
    return held  # D's own answer, which P may read back


def _tables_of_ranks(
    name: str, stated: Sequence[tuple[Any, Mapping[str, int], Any]]
) -> tuple[int, ...]:
    """The places of all ranks' tables, masked, for whoever has shaken hands with them.

    Empty where one has none, or nobody says which is read.

    Args:
        stated: place, tables and metadata of each worker.
    """
    found: dict[int, int | None] = {}
    for place, tables, metadata in stated:
        stage, rank = place if isinstance(place, tuple) else (0, place)
        address = tables.get(name)
        if address is not None:
            address ^= mask_of(_agent_metadata(metadata))
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


class StatedTables(dict[str, int]):
    """The addresses of one worker's tables, by the field of the answer that names them."""
