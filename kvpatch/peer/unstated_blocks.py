"""Fills in what a handshake of ``<= 0.20`` leaves open of a peer's blocks.

P's kvpatch states it, or the handshake does, or the operator declares it, in this order. What is
still open is taken for ours, and named: such a peer is a like engine, or it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.peer.agent_metadata import AgentMetadata, StatedBlocks
from kvpatch.peer.block_shapes import heads_of
from kvpatch.peer.cpu_keys import BY_WORD, is_key_order_open, with_key_order
from kvpatch.peer.remote_geometry import kv_split_of_peer, tokens_in_bytes
from kvpatch.worker.local_geometry import LocalGeometry

#: The layout that 0.10.0, which states none, gives every NixlConnector unless told otherwise.
_UNTOLD_LAYOUT = "HND"


@dataclass(frozen=True)
class DeclaredGeometry:
    """The geometry that the operator declares of peers that do not say it; None for nothing.

    Attributes:
        block_tokens: of ``KVPATCH_PEER_BLOCK_SIZE``.
        layout: of ``KVPATCH_PEER_LAYOUT``.
        keys: of ``KVPATCH_PEER_KEYS``.
    """

    block_tokens: int | None = None
    layout: str | None = None
    keys: KeyOrder | None = None


def declared_geometry() -> DeclaredGeometry:
    """Reads it from this process's environment."""
    keys = BY_WORD.get(settings.peer_keys() or "")
    return DeclaredGeometry(settings.peer_block_size(), settings.peer_layout(), keys)


@dataclass(frozen=True)
class Completed:
    """A peer's metadata with what it left open filled in.

    Attributes:
        is_open: True if some of it is taken for ours.
        is_like: False if what is taken for ours cannot be, or is not what vLLM chooses by itself.
        variables: that would say what is taken for ours.
    """

    peer: AgentMetadata
    variables: tuple[str, ...] = ()
    is_like: bool = True

    @property
    def is_open(self) -> bool:
        """True if the blocks are like ours only where P is like this engine."""
        return any(name != settings.PEER_KEYS for name in self.variables)


def leaves_open(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if P's kvpatch has to be asked what its blocks are."""
    if peer.form is not None or peer.releases:
        return False
    sizes = ours.kernel_sizes
    may_cut = peer.kernel_blocks_per_block is None and (sizes is None or sizes.cuts_some)
    return peer.block_tokens is None or ours.misreads_blocks or may_cut


def complete(ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry) -> Completed:
    """Fills in what a peer's metadata leaves open."""
    if ours.misreads_blocks and peer.form is None:
        peer = replace(peer, block_tokens=None)
    if peer.layout is None and kv_split_of_peer(ours, peer) == "apart":
        peer = replace(peer, layout="NHD")  # as kvcached's are, with keys and values apart
    stated = peer.stated_blocks
    if stated is not None:
        peer = _as_stated(ours, peer, stated)
    found = _with_layout(
        ours, _with_cut(ours, _with_tokens(ours, peer, declared), declared), declared
    )
    _check_declared(found.peer, declared)
    found = replace(found, peer=with_key_order(ours, found.peer, declared.keys))
    if is_key_order_open(ours, found.peer):
        found = replace(found, variables=(*found.variables, settings.PEER_KEYS))
    return found


def has_open_layout(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if heads and tokens of a peer's blocks may lie in either order for all it says."""
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    return (
        peer.layout is None  # 0.10.0
        and ours.key_order is KeyOrder.ROW_MAJOR
        and (peer.block_tokens or 2) > 1
        and heads > 1
        and ours.has_heads
    )


def _as_stated(ours: LocalGeometry, peer: AgentMetadata, stated: StatedBlocks) -> AgentMetadata:
    if stated.dtype and ours.dtype and stated.dtype != ours.dtype:
        raise PeerRefused(
            f"its keys and values are of {stated.dtype}, ours of {ours.dtype}",
            "use one --dtype and --kv-cache-dtype on both sides",
        )
    tokens = peer.block_tokens
    if tokens is None:  # its bytes are compared with this number of tokens
        tokens = tokens_in_bytes(ours, peer)
    if tokens != stated.kernel_tokens:
        raise PeerRefused(
            f"its kvpatch states kernel blocks of {stated.kernel_tokens} tokens, and its handshake "
            f"comes to {tokens}",
            "use one model, --dtype, --kv-cache-dtype, vLLM and kvpatch on both sides",
        )
    return replace(
        peer,
        block_tokens=tokens,
        kernel_blocks_per_block=stated.block_tokens // stated.kernel_tokens,
        layout=stated.layout if peer.layout is None else peer.layout,
    )


def _with_tokens(ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry) -> Completed:
    """Fills in block tokens (``<= 0.11.0``), where no block is cut and items may differ in size."""
    if peer.block_tokens is not None:
        return Completed(peer)
    found = replace(peer, block_tokens=tokens_in_bytes(ours, peer), kernel_blocks_per_block=1)
    is_open = declared.block_tokens is None
    return Completed(found, (settings.PEER_BLOCK_SIZE,) if is_open else ())


def _with_layout(ours: LocalGeometry, found: Completed, declared: DeclaredGeometry) -> Completed:
    if not has_open_layout(ours, found.peer):
        return found
    if declared.layout is not None:
        return replace(found, peer=replace(found.peer, layout=declared.layout))
    is_like = found.is_like and ours.inner_layout == _UNTOLD_LAYOUT
    return Completed(found.peer, (*found.variables, settings.PEER_LAYOUT), is_like)


def _with_cut(ours: LocalGeometry, found: Completed, declared: DeclaredGeometry) -> Completed:
    """Completes the kernel blocks in a block, where a backend may cut blocks (0.11.1 to 0.20)."""
    peer, sizes, wanted = found.peer, ours.kernel_sizes, declared.block_tokens
    tokens = peer.block_tokens
    if peer.kernel_blocks_per_block is not None or tokens is None:
        return found
    if sizes is None and wanted is not None and wanted % tokens == 0:
        return replace(found, peer=replace(peer, kernel_blocks_per_block=wanted // tokens))
    if sizes is None:
        return replace(found, variables=(settings.PEER_BLOCK_SIZE,))
    every = sizes.parts(tokens)
    # It counts kernel blocks, so many to a block.
    parts = tuple(n for n in every if peer.blocks % n == 0) or every
    if wanted is not None:
        parts = tuple(n for n in parts if n * tokens == wanted)
    if not parts:
        raise _not_as_declared(declared, f"kernel blocks of {tokens} tokens")
    own = ours.kernel_blocks_per_block
    is_like = own in parts
    peer = replace(peer, kernel_blocks_per_block=own if is_like else parts[0])
    if len(parts) == 1:
        return replace(found, peer=peer)
    return Completed(peer, (settings.PEER_BLOCK_SIZE,), is_like)


def _check_declared(peer: AgentMetadata, declared: DeclaredGeometry) -> None:
    """Refuses a peer whose handshake does not come to what the operator has declared."""
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
