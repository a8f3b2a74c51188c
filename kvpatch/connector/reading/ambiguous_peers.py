"""The peers whose handshakes leave something open: none, where handshakes say all of a peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import KvpatchError, NotProven

if TYPE_CHECKING:
    from kvpatch.connector.handshake.possible_geometries import GeometryName
    from kvpatch.connector.handshake.remote_ranks import RemoteRank
    from kvpatch.connector.read_request import ReadRequest


class AmbiguousPeers:
    """Those of one worker: none.

    Releases <= 0.20 have some (``kvpatch.legacy.content_proof.prover``).
    """

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The engines of which something is open."""
        return ()

    def add(
        self,
        engine_id: str,
        candidates: Mapping[GeometryName, RemoteRank],
        refusals: Mapping[GeometryName, KvpatchError],
        admit: Callable[[GeometryName], None],
    ) -> None:
        """Books a rank of an engine that has to be proven.

        Args:
            candidates: what it may be.
            refusals: of what it may be and cannot be read as.
            admit: books the candidate that is proven.

        Raises:
            NotProven: nobody here can prove anything.
        """
        raise NotProven(
            f"engine {engine_id!r:.200} cannot be read: its handshake leaves open what its blocks "
            "are, which this vLLM's handshakes say",
            "use one vLLM on both sides",
        )

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        """Books an engine of which there is nothing to prove, or nothing more."""

    def forget(self, engine_id: str) -> None:
        """Forgets an engine that the release has let go of."""

    def is_ambiguous(self, engine_id: str) -> bool:
        """Whether nothing may be read from an engine but for a proof."""
        return False

    def ranks(self, engine_id: str) -> dict[int, RemoteRank]:
        """The ranks of an engine of which something is open, as whatever it may be."""
        return {}

    def require_proven(self, engine_id: str) -> None:
        """Raises:
        KvpatchError: nothing can be loaded from an engine before it is proven what it is.
        """

    def sample(
        self,
        nixl: Any,
        agent: str,
        notification: bytes,
        request_id: str,
        engine_id: str,
        request: ReadRequest,
    ) -> bool:
        """Reads some of a peer's blocks of a prompt before it is told that it may free them.

        Args:
            agent: NIXL's name of the peer's rank.
            notification: which tells it; it is sent after the read.
            request: of which D computes the prompt itself.

        Returns whether something is read.
        """
        return False
