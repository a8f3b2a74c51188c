"""The order of keys in the blocks of a P with the CPU backend: by column, or in tiles (AMX).

No release states it. P's own kvpatch may, and the operator may declare it; where a processor with
AMX makes no tiles of such items or blocks, nothing is open.
"""

from __future__ import annotations

from dataclasses import replace

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import TILED_CHANNELS, TILED_TOKENS
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.worker.local_geometry import LocalGeometry

#: By the words that settings and peers have for them.
BY_WORD = {"columns": KeyOrder.COLUMN_MAJOR, "tiles": KeyOrder.TILED}
_WORDS = {order: word for word, order in BY_WORD.items()}

#: Of an element, where a CPU's keys are in tiles on no processor; and where AMX may have them so.
_UNTILED_BYTES, _TILED_BYTES = 4, 2


def with_key_order(
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
            f"{settings.PEER_KEYS} declares {_word(declared)} and P has keys in "
            f"{_word(peer.stated_keys)}",
            "set it to what P has, or unset it",
        )
    if found is None and by_form is not None:
        raise PeerRefused(
            "a CPU with AMX has keys and values of bfloat16 in tiles, one without has keys by "
            "column, and the handshake does not say which P is",
            "set KVPATCH_PEER_KEYS to what P has (tiles with AMX, columns on other x86 "
            "processors), set ENABLE_KVPATCH on P, or use --dtype float32",
        )
    if found is KeyOrder.TILED:
        _check_widths(ours)
    return replace(peer, key_order=found)


def is_key_order_open(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if a CPU's keys are taken for ours, because nobody says how they lie."""
    return (
        peer.key_order is None
        and ours.key_order is not KeyOrder.ROW_MAJOR
        and peer.backend in (None, ours.backend)
        and may_be_tiled(ours, peer)
    )


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


def word_of(order: KeyOrder) -> str | None:
    """Returns what peers are told of keys whose order a processor chooses; None for any other."""
    return _WORDS.get(order)


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


def _check_widths(ours: LocalGeometry) -> None:
    if any(width % TILED_CHANNELS for width in _widths(ours)):
        raise PeerRefused(
            f"heads of some layers have no multiple of {TILED_CHANNELS} channels, and are in no "
            "tiles",
            "use --dtype float32",
        )


def _widths(ours: LocalGeometry) -> set[int]:
    return {plane.counts.channels for layer in ours.layers.values() for plane in layer.planes}


def _word(order: KeyOrder | None) -> str:
    return _WORDS[order] if order is not None else "nothing"
