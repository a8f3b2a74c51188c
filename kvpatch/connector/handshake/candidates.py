"""What a peer may be for all that its handshake says, and what the operator declares of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpatch.connector.handshake.agent_metadata import Statement
from kvpatch.connector.handshake.block_shapes import heads_of
from kvpatch.connector.handshake.remote_geometry import refusal, tokens_in_bytes
from kvpatch.connector.handshake.split_kv import kv_split_of_peer
from kvpatch.connector.kernel_block_sizes import KernelBlockSizes
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry import KeyOrder

#: Of a candidate: the kernel blocks of a block; <= 0.11.0 its layout, or "stated".
Name = int | str


@dataclass(frozen=True)
class Declared:
    """What the operator says of peers that do not say it; None for nothing.

    Attributes:
        block_tokens: of ``KVPATCH_PEER_BLOCK_SIZE``.
        layout: of ``KVPATCH_PEER_LAYOUT``.
        proves_layout: whether one that neither states nor is declared is to be proven.
    """

    block_tokens: int | None = None
    layout: str | None = None
    proves_layout: bool = True


def declared(facts: ReleaseFacts) -> Declared:
    """As this process's environment has it."""
    proves_layout = facts.states_layout or settings.unstated_layout() == "prove"
    return Declared(settings.peer_block_size(), settings.peer_layout(), proves_layout)


@dataclass(frozen=True)
class Candidates:
    """What a peer may be: one of the statements, completed.

    Attributes:
        is_open: whether content has to prove which one, or that it is the only one.
    """

    statements: tuple[Statement, ...]
    is_open: bool = False

    @property
    def named(self) -> dict[Name, Statement]:
        """By what tells them apart."""
        if len({one.layout for one in self.statements}) > 1:
            return {str(one.layout): one for one in self.statements}
        if len(self.statements) > 1:
            return {int(one.kernel_blocks_per_block or 1): one for one in self.statements}
        return {"stated": self.statements[0]}


def candidates_of(ours: LocalGeometry, peer: Statement, told: Declared) -> Candidates:
    """What follows from a statement beside what it says.

    Raises:
        PeerRefused: its bytes are no whole number of tokens, or it is not what the operator
            has declared.
    """
    states_layout = peer.layout is not None
    if not states_layout and kv_split_of_peer(ours, peer) == "apart":
        peer = replace(peer, layout="NHD")  # as kvcached's are, with keys and values apart
    if peer.block_tokens is None:
        found = _by_bytes(ours, peer, told)
    elif peer.kernel_blocks_per_block is None and ours.kernel_sizes is not None:
        found = _by_cut(ours, peer, ours.kernel_sizes, told)
    else:
        _check_block_size(ours, peer, told)
        found = Candidates((peer,))
    _check_layout(ours, peer, told)
    return found


def _by_bytes(ours: LocalGeometry, peer: Statement, told: Declared) -> Candidates:
    """In releases <= 0.11.0, where no block is cut, and items may be of another size than ours."""
    tokens = tokens_in_bytes(ours, peer)
    peer = replace(peer, block_tokens=tokens, kernel_blocks_per_block=1)
    _check_block_size(ours, peer, told)
    layouts = _layouts(ours, peer, told)
    statements = tuple(replace(peer, layout=layout) for layout in layouts)
    return Candidates(statements, is_open=told.block_tokens is None or len(layouts) > 1)


def _layouts(ours: LocalGeometry, peer: Statement, told: Declared) -> tuple[str | None, ...]:
    """0.10.0 states no layout; one that is not stated is read as ours."""
    if not has_two_layouts(ours, peer):
        return (peer.layout,)
    if told.layout is not None:
        return (told.layout,)
    return ("HND", "NHD") if told.proves_layout else (peer.layout,)


def has_two_layouts(ours: LocalGeometry, peer: Statement) -> bool:
    """Whether heads and tokens of a peer's blocks may lie in either order for all it says."""
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return (
        peer.layout is None  # 0.10.0
        and ours.key_order is KeyOrder.ROW_MAJOR
        and (peer.block_tokens or 2) > 1
        and heads > 1
        and ours.has_heads
    )


def _by_cut(
    ours: LocalGeometry, peer: Statement, sizes: KernelBlockSizes, told: Declared
) -> Candidates:
    """0.11.1 to 0.20: how many kernel blocks a block has is open where a backend may cut."""
    kernel_tokens = peer.block_tokens or ours.block_tokens
    every = sizes.parts(kernel_tokens)
    # It counts kernel blocks, so many to a block.
    parts = tuple(n for n in every if peer.blocks % n == 0) or every
    if told.block_tokens is not None:
        parts = tuple(n for n in parts if n * kernel_tokens == told.block_tokens)
    if not parts:
        raise _not_as_declared(ours, peer, told, f"kernel blocks of {kernel_tokens} tokens")
    statements = tuple(replace(peer, kernel_blocks_per_block=n) for n in parts)
    return Candidates(statements, is_open=len(statements) > 1)


def _check_block_size(ours: LocalGeometry, peer: Statement, told: Declared) -> None:
    """Whether what the operator has declared is what the handshake comes to.

    Raises:
        PeerRefused: it is not.
    """
    said, tokens, parts = told.block_tokens, peer.block_tokens, peer.kernel_blocks_per_block
    if said is None or tokens is None:
        return
    if said % tokens if parts is None else said != tokens * parts:
        raise _not_as_declared(ours, peer, told, f"blocks of {tokens * (parts or 1)} tokens")


def _check_layout(ours: LocalGeometry, peer: Statement, told: Declared) -> None:
    if told.layout is not None and peer.inner_layout not in (None, told.layout):
        raise refusal(
            ours,
            peer,
            f"{settings.PEER_LAYOUT} declares {told.layout} and its handshake says {peer.layout}: "
            "set it to what P has, or unset it",
        )


def _not_as_declared(
    ours: LocalGeometry, peer: Statement, told: Declared, found: str
) -> PeerRefused:
    return refusal(
        ours,
        peer,
        f"{settings.PEER_BLOCK_SIZE} declares blocks of {told.block_tokens} tokens, and "
        f"its handshake comes to {found}: set it to the --block-size of P, or unset it",
    )
