"""The digests that a scheduler promises, and has its workers make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpatch.checks.digests.promise import Promise
from kvpatch.checks.holds.granted import tables_of_ranks
from kvpatch.checks.holds.hold import read_hold
from kvpatch.load.read_request import DIGEST, HOLD

_ORDERS = "kvpatch_digest_orders"
_TABLE = "_kvpatch_digest_table"


class DigestOrder(NamedTuple):
    """What a worker is to digest of a request that is over.

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


class PromisedDigests:
    """One scheduler's."""

    def __init__(self) -> None:
        #: What workers have not been told yet, by request.
        self._orders: dict[str, tuple[Any, ...]] = {}
        #: Where the tables of the ranks are; empty where one of them has none.
        self._tables: tuple[int, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether its workers can write digests down."""
        return bool(self._tables)

    def learn(self, metadata: Mapping[Any, Any]) -> None:
        """Takes where the ranks' tables are out of what the workers state at handshakes."""
        self._tables = tables_of_ranks(metadata, take_table)

    def promised(self, request: Any, block_ids: Any, params: Mapping[str, Any]) -> Any:
        """A request's answer, with the promise in it where its blocks are held."""
        hold = read_hold(params[HOLD])
        if hold is None:
            return params
        held = int(params.get("remote_num_tokens") or request.num_computed_tokens)  # from 0.21 on
        named = params.get("remote_block_ids") or ()
        order = DigestOrder(hold.generation, block_ids, _tokens(request, held), named, held)
        self._orders[request.request_id] = tuple(order)
        return {**params, DIGEST: str(Promise(self._tables))}

    @property
    def has_news(self) -> bool:
        """Whether workers have to be told something."""
        return bool(self._orders)

    def tell(self, metadata: Any) -> None:
        """Writes what is new onto what the workers are told in a step."""
        if self._orders:
            setattr(metadata, _ORDERS, self._orders)
            self._orders = {}


def _tokens(request: Any, held: int) -> int:
    """How many of a request's tokens D may load, as the side that reads them counts."""
    if (request.kv_transfer_params or {}).get("do_remote_decode"):
        return int(min(held, request.num_prompt_tokens))
    return held  # D's own answer, which P may read back


def orders_in(metadata: Any) -> dict[str, DigestOrder]:
    """By request, what a step's metadata has a worker digest."""
    found: Mapping[str, tuple[Any, ...]] = getattr(metadata, _ORDERS, {})
    return {name: DigestOrder(*order) for name, order in found.items()}


def state_table(metadata: Any, address: int) -> None:
    """Writes where a worker's table is onto what it states at handshakes, for its scheduler."""
    setattr(metadata, _TABLE, address)


def take_table(metadata: Any) -> int | None:
    """Takes it off again, so that what peers are sent is the release's own."""
    found: int | None = vars(metadata).pop(_TABLE, None)
    return found
