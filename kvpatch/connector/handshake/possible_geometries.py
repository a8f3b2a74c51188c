"""Which geometries a peer may have for all that its handshake states, or that are declared."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpatch.connector.handshake.agent_metadata import AgentMetadata
from kvpatch.connector.handshake.block_shapes import heads_of
from kvpatch.connector.handshake.cpu_keys import BY_WORD, with_key_order
from kvpatch.connector.handshake.regions_by_number import tokens_in_bytes
from kvpatch.connector.handshake.split_kv import kv_split_of_peer
from kvpatch.connector.local.kernel_block_sizes import KernelBlockSizes
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder

#: Of a possible geometry: the kernel blocks of a block; <= 0.11.0 its layout, or "stated".
GeometryName = int | str


@dataclass(frozen=True)
class DeclaredGeometry:
    """What the operator says of peers that do not say it; None for nothing.

    Attributes:
        block_tokens: of ``KVPATCH_PEER_BLOCK_SIZE``.
        layout: of ``KVPATCH_PEER_LAYOUT``.
        keys: of ``KVPATCH_PEER_KEYS``.
        proves_layout: whether one that neither states nor is declared is to be proven.
    """

    block_tokens: int | None = None
    layout: str | None = None
    proves_layout: bool = True
    keys: KeyOrder | None = None


def declared_geometry(facts: ReleaseFacts) -> DeclaredGeometry:
    """As this process's environment has it."""
    proves_layout = facts.states_layout or settings.unstated_layout() == "prove"
    keys = BY_WORD.get(settings.peer_keys() or "")
    return DeclaredGeometry(settings.peer_block_size(), settings.peer_layout(), proves_layout, keys)


@dataclass(frozen=True)
class PossibleGeometries:
    """A peer's metadata, completed in each way that is possible.

    Attributes:
        is_open: whether content has to prove which one is right, or that the only one is.
    """

    completed: tuple[AgentMetadata, ...]
    is_open: bool = False

    @property
    def named(self) -> dict[GeometryName, AgentMetadata]:
        """By what tells them apart."""
        if len({one.layout for one in self.completed}) > 1:
            return {str(one.layout): one for one in self.completed}
        if len(self.completed) > 1:
            return {int(one.kernel_blocks_per_block or 1): one for one in self.completed}
        return {"stated": self.completed[0]}


def possible_geometries(
    ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry
) -> PossibleGeometries:
    """What a peer's metadata leaves open, completed.

    Raises:
        PeerRefused: its bytes are no whole number of tokens, or it is not what the operator
            has declared.
    """
    if peer.layout is None and kv_split_of_peer(ours, peer) == "apart":
        peer = replace(peer, layout="NHD")  # as kvcached's are, with keys and values apart
    if peer.block_tokens is None:
        found = _by_bytes(ours, peer, declared)
    elif peer.kernel_blocks_per_block is None and ours.kernel_sizes is not None:
        found = _by_cut(peer, peer.block_tokens, ours.kernel_sizes, declared)
    else:
        found = PossibleGeometries((peer,))
    _check_declared(found.completed[0], declared)
    completed = (with_key_order(ours, one, declared.keys) for one in found.completed)
    return replace(found, completed=tuple(completed))


def _by_bytes(
    ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry
) -> PossibleGeometries:
    """In releases <= 0.11.0, where no block is cut, and items may be of another size than ours."""
    tokens = tokens_in_bytes(ours, peer)
    peer = replace(peer, block_tokens=tokens, kernel_blocks_per_block=1)
    layouts = _layouts(ours, peer, declared)
    completed = tuple(replace(peer, layout=layout) for layout in layouts)
    return PossibleGeometries(completed, declared.block_tokens is None or len(layouts) > 1)


def _layouts(
    ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry
) -> tuple[str | None, ...]:
    """0.10.0 states no layout; one that is not stated is read as ours."""
    if not has_two_layouts(ours, peer):
        return (peer.layout,)
    if declared.layout is not None:
        return (declared.layout,)
    return ("HND", "NHD") if declared.proves_layout else (peer.layout,)


def has_two_layouts(ours: LocalGeometry, peer: AgentMetadata) -> bool:
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
    peer: AgentMetadata, kernel_tokens: int, sizes: KernelBlockSizes, declared: DeclaredGeometry
) -> PossibleGeometries:
    """0.11.1 to 0.20: how many kernel blocks a block has is open where a backend may cut."""
    every = sizes.parts(kernel_tokens)
    # It counts kernel blocks, so many to a block.
    parts = tuple(n for n in every if peer.blocks % n == 0) or every
    if declared.block_tokens is not None:
        parts = tuple(n for n in parts if n * kernel_tokens == declared.block_tokens)
    if not parts:
        raise _not_as_declared(declared, f"kernel blocks of {kernel_tokens} tokens")
    completed = tuple(replace(peer, kernel_blocks_per_block=n) for n in parts)
    return PossibleGeometries(completed, is_open=len(completed) > 1)


def _check_declared(peer: AgentMetadata, declared: DeclaredGeometry) -> None:
    """Whether what the operator has declared is what the handshake comes to."""
    wanted, tokens, parts = declared.block_tokens, peer.block_tokens, peer.kernel_blocks_per_block
    if wanted is None or tokens is None:
        is_wanted = True
    elif parts is None:
        is_wanted = wanted % tokens == 0
    else:
        is_wanted = wanted == tokens * parts
    if not is_wanted:
        raise _not_as_declared(declared, f"blocks of {(tokens or 0) * (parts or 1)} tokens")
    if declared.layout is not None and peer.inner_layout not in (None, declared.layout):
        raise PeerRefused(
            f"{settings.PEER_LAYOUT} declares {declared.layout} and its handshake says "
            f"{peer.layout}",
            "set it to what P has, or unset it",
        )


def _not_as_declared(declared: DeclaredGeometry, found: str) -> PeerRefused:
    return PeerRefused(
        f"{settings.PEER_BLOCK_SIZE} declares blocks of {declared.block_tokens} tokens, and its "
        f"handshake comes to {found}",
        "set it to the --block-size of P, or unset it",
    )
