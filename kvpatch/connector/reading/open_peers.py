"""What the handshakes of peers leave open; nothing, where a release's handshakes say all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import KvpatchError, NotProven

if TYPE_CHECKING:
    from kvpatch.connector.handshake.candidates import Name
    from kvpatch.connector.handshake.remote_ranks import Rank
    from kvpatch.connector.read_request import Order


class OpenPeers:
    """The peers of one worker of which something is open: none.

    Releases <= 0.20 have others (``kvpatch.legacy.proofs``).
    """

    @property
    def open_engines(self) -> tuple[str, ...]:
        """Those of which something is open."""
        return ()

    def open(
        self,
        engine_id: str,
        candidates: Mapping[Name, Rank],
        refusals: Mapping[Name, KvpatchError],
        admit: Callable[[Name], None],
    ) -> None:
        """Books a rank of an engine that has to be proven.

        Raises:
            NotProven: nobody here can prove anything.
        """
        raise NotProven(
            f"engine {engine_id!r:.200} cannot be read: its handshake leaves open what its blocks "
            "are, which this vLLM's handshakes say: use one vLLM on both sides"
        )

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        """Books an engine of which there is nothing to prove."""

    def forget(self, engine_id: str) -> None:
        """Forgets an engine that the release has let go of."""

    def is_open(self, engine_id: str) -> bool:
        """Whether something of an engine is open."""
        return False

    def ranks(self, engine_id: str) -> dict[int, Rank]:
        """The ranks of an engine of which something is open, as whatever it may be."""
        return {}

    def check(self, engine_id: str) -> None:
        """Raises:
        KvpatchError: nothing can be loaded from an engine before it is proven what it is.
        """

    def sampling(
        self, request_id: str, engine_id: str, order: Order
    ) -> AbstractContextManager[None]:
        """While inside, a request that D computes itself is to show what its P's blocks are."""
        return nullcontext()

    def post(self, nixl: Any, agent: str, notification: bytes) -> bool:
        """Whether a message to a peer waits until a sample of its blocks has been read."""
        return False
