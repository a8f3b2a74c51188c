"""Fills in what a handshake of ``<= 0.20`` leaves open of a peer's blocks.

P's kvpatch states it, or the handshake does, or the operator declares it, in this order. What is
still open is taken for ours, and named: such a peer is a like engine, or it is refused.

No release states how keys lie in the blocks of a P with the CPU backend: by column, or in tiles
(AMX). Where a processor with AMX makes no tiles of such items or blocks, nothing is open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import TILED_CHANNELS, TILED_TOKENS
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import heads_of
from kvpatch.peer.remote_geometry import kv_split_of_peer, tokens_in_bytes
from kvpatch.worker.local_geometry import LocalGeometry

#: The layout that 0.10.0, which states none, gives every NixlConnector unless told otherwise.
_UNTOLD_LAYOUT = "HND"
#: By the words that settings and peers have for them.
BY_WORD = {"columns": KeyOrder.COLUMN_MAJOR, "tiles": KeyOrder.TILED}
_WORDS = {order: word for word, order in BY_WORD.items()}

#: Of an element, where a CPU's keys are in tiles on no processor; and where AMX may have them so.
_UNTILED_BYTES, _TILED_BYTES = 4, 2


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
    variables, is_like = list[str](), True
    if ours.misreads_blocks and peer.form is None:
        peer = replace(peer, block_tokens=None)
    if peer.layout is None and kv_split_of_peer(ours, peer) == "apart":
        peer = replace(peer, layout="NHD")  # as kvcached's are, with keys and values apart
    stated = peer.stated_blocks
    if stated is not None:
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
                f"its kvpatch states kernel blocks of {stated.kernel_tokens} tokens, and its "
                f"handshake comes to {tokens}",
                "use one model, --dtype, --kv-cache-dtype, vLLM and kvpatch on both sides",
            )
        peer = replace(
            peer,
            block_tokens=tokens,
            kernel_blocks_per_block=stated.block_tokens // stated.kernel_tokens,
            layout=stated.layout if peer.layout is None else peer.layout,
        )
    if peer.block_tokens is None:  # <= 0.11.0: no block is cut, and items may differ in size
        peer = replace(peer, block_tokens=tokens_in_bytes(ours, peer), kernel_blocks_per_block=1)
        variables += [settings.PEER_BLOCK_SIZE] * (declared.block_tokens is None)
    elif peer.kernel_blocks_per_block is None:  # 0.11.1 to 0.20: a backend may cut blocks
        own, cuts = ours.kernel_blocks_per_block, _possible_cuts(ours, peer, declared)
        if len(cuts) != 1:
            variables.append(settings.PEER_BLOCK_SIZE)
            is_like = not cuts or own in cuts
        if cuts:
            peer = replace(peer, kernel_blocks_per_block=own if own in cuts else cuts[0])
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    is_open = peer.layout is None and heads > 1 and (peer.block_tokens or 2) > 1  # 0.10.0
    if is_open and ours.key_order is KeyOrder.ROW_MAJOR and ours.has_heads:
        peer = replace(peer, layout=declared.layout)
        if declared.layout is None:
            variables.append(settings.PEER_LAYOUT)
            is_like = is_like and ours.inner_layout == _UNTOLD_LAYOUT
    wanted, tokens, parts = declared.block_tokens, peer.block_tokens, peer.kernel_blocks_per_block
    if wanted is not None and tokens is not None:
        is_wanted = wanted % tokens == 0 if parts is None else wanted == tokens * parts
        if not is_wanted:
            raise _not_as_declared(declared, f"blocks of {tokens * (parts or 1)} tokens")
    if declared.layout is not None and peer.inner_layout not in (None, declared.layout):
        raise PeerRefused(
            f"{settings.PEER_LAYOUT} declares {declared.layout} and its handshake says "
            f"{peer.layout}",
            "set it to what P has, or unset it",
        )
    peer = _with_key_order(ours, peer, declared.keys)
    is_by_column = ours.key_order is not KeyOrder.ROW_MAJOR
    is_cpus = is_by_column and peer.backend in (None, ours.backend)
    if peer.key_order is None and is_cpus and may_be_tiled(ours, peer):
        variables.append(settings.PEER_KEYS)
    return Completed(peer, tuple(variables), is_like)


def _possible_cuts(
    ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry
) -> tuple[int, ...]:
    """Returns how many kernel blocks a peer's block may be cut into; none where nobody knows."""
    tokens, wanted = peer.block_tokens or ours.block_tokens, declared.block_tokens
    if ours.kernel_sizes is None:
        return () if wanted is None or wanted % tokens else (wanted // tokens,)
    every = ours.kernel_sizes.parts(tokens)
    # It counts kernel blocks, so many to a block.
    parts = tuple(n for n in every if peer.blocks % n == 0) or every
    found = tuple(n for n in parts if wanted in (None, n * tokens))
    if not found:
        raise _not_as_declared(declared, f"kernel blocks of {tokens} tokens")
    return found


def _not_as_declared(declared: DeclaredGeometry, found: str) -> PeerRefused:
    return PeerRefused(
        f"{settings.PEER_BLOCK_SIZE} declares blocks of {declared.block_tokens} tokens, and its "
        f"handshake comes to {found}",
        "set it to the --block-size of P, or unset it",
    )


# --- a CPU's keys ---------------------------------------------------------------------


def _with_key_order(
    ours: LocalGeometry, peer: AgentMetadata, declared: KeyOrder | None
) -> AgentMetadata:
    """Returns a peer whose block size is known with its key order, where it has the CPU backend.

    The order is left open where nobody states it and our backend is the CPU's as well: the release
    reads like blocks.
    """
    by_form = peer.key_order  # of another backend than ours; else it has ours
    if (by_form or ours.key_order) is KeyOrder.ROW_MAJOR:
        return peer
    if peer.backend not in (None, ours.backend):  # rows, which the release reorders for a CPU
        return peer
    if ours.item_bytes not in (_UNTILED_BYTES, _TILED_BYTES):
        return peer
    if not may_be_tiled(ours, peer):
        return replace(peer, key_order=KeyOrder.COLUMN_MAJOR)
    found = peer.stated_keys or declared
    if None not in (declared, peer.stated_keys) and declared is not peer.stated_keys:
        raise PeerRefused(
            f"{settings.PEER_KEYS} declares {word_of(declared)} and P has keys in "
            f"{word_of(peer.stated_keys)}",
            "set it to what P has, or unset it",
        )
    if found is None and by_form is not None:
        raise PeerRefused(
            "a CPU with AMX has keys and values of bfloat16 in tiles, one without has keys by "
            "column, and the handshake does not say which P is",
            "set KVPATCH_PEER_KEYS to what P has (tiles with AMX, columns on other x86 "
            "processors), set ENABLE_KVPATCH on P, or use --dtype float32",
        )
    if found is KeyOrder.TILED and any(width % TILED_CHANNELS for width in _widths(ours)):
        raise PeerRefused(
            f"heads of some layers have no multiple of {TILED_CHANNELS} channels, and are in no "
            "tiles",
            "use --dtype float32",
        )
    return replace(peer, key_order=found)


def check_key_order(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a heterogeneous peer in whose blocks keys lie in an order that is not known."""
    is_known = peer.key_order is not None or ours.item_bytes == _UNTILED_BYTES
    if ours.key_order is KeyOrder.ROW_MAJOR or is_known:
        return
    if ours.item_bytes != _TILED_BYTES:
        raise PeerRefused(
            f"how a CPU lays out keys of {ours.item_bytes} bytes depends on its processor, and the "
            "handshake does not say so",
            "use --kv-cache-dtype auto, or one block size on both sides",
        )
    raise PeerRefused(
        "a CPU with AMX tiles keys and values of bfloat16 where the block size allows, and the "
        "handshake does not say whether P has it",
        "set KVPATCH_PEER_KEYS to what P has (tiles with AMX, columns on other x86 processors), "
        "set ENABLE_KVPATCH on P, or use --dtype float32, or one block size on both sides",
    )


def word_of(order: KeyOrder | None) -> str | None:
    """Returns what peers are told of keys whose order a processor chooses; None for any other."""
    return _WORDS.get(order) if order else None


def order_of(word: object) -> KeyOrder | None:
    """Returns the order that a peer's word names; None of words that only a newer kvpatch knows."""
    return BY_WORD.get(word) if isinstance(word, str) else None


def may_be_tiled(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if a processor with AMX would have a peer's blocks in tiles."""
    return (
        ours.tiles_on_amx
        and ours.item_bytes == _TILED_BYTES
        and (peer.block_tokens or TILED_TOKENS) % TILED_TOKENS == 0
        and any(width % TILED_CHANNELS == 0 for width in _widths(ours))
    )


def _widths(ours: LocalGeometry) -> set[int]:
    return {plane.counts.channels for layer in ours.layers.values() for plane in layer.planes}
