"""What a peer says of its cache at the handshake, in one vocabulary for all generations."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

from kvpatch._errors import KvpatchError

#: What a block of a layout looks like inside: a head's tokens are neighbours in
#: HND, a token's heads in NHD. In LHBNC and BHLNC a block is not one piece.
_INNER = {
    "HND": "HND",
    "LBHNC": "HND",
    "BLHNC": "HND",
    "NHD": "NHD",
    "LBNHC": "NHD",
    "BLNHC": "NHD",
}
#: The name that a release gives to HND, by the name of any layout of its.
_HND_OF = {"HND": "HND", "NHD": "HND"}


#: No engine has blocks as large; a peer that says so would have us list their parts.
_MOST_TOKENS = 1 << 20


class PeerRefused(KvpatchError):
    """A peer whose cache cannot be read; the message has both geometries and what helps."""


@dataclass(frozen=True)
class Statement:
    """One rank of a peer, as it describes itself.

    Attributes:
        block_tokens: of a kernel block; None where the release does not say.
        kernel_blocks_per_block: kernel blocks in one of the blocks that ids count; None
            where the release does not say.
        layout: the name that was sent; None where the release does not say.
        blocks: kernel blocks in each region.
        addresses: where each region starts.
        block_bytes: of one kernel block in each region.
        stride_bytes: from one kernel block of a region to the next.
        backend: the attention backend's name; None where the release does not say.
        region_names: the layer that each region is named after; None where it does not say.
        memory_kind: of all regions, in NIXL's words; None where the release does not say.
    """

    engine_id: str
    tp_rank: int
    tp_size: int
    block_tokens: int | None
    kernel_blocks_per_block: int | None
    layout: str | None
    blocks: int
    addresses: tuple[int, ...]
    block_bytes: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    backend: str | None
    device_id: int
    region_names: tuple[str, ...] | None = None
    memory_kind: Literal["DRAM", "VRAM"] | None = None

    @property
    def inner_layout(self) -> str | None:
        """HND or NHD; None for a layout that nobody here can read."""
        return None if self.layout is None else _INNER.get(self.layout)

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_tokens} tokens, layout {self.layout}, rank {self.tp_rank} of "
            f"{self.tp_size}, {self.blocks} blocks in {len(self.addresses)} regions of "
            f"{sorted(set(self.block_bytes))} bytes a block"
        )


def hnd_like(layout: str) -> str:
    """HND as the release calls it that calls another layout `layout`."""
    return _HND_OF.get(layout, "LBHNC")


def read_statement(metadata: Any, tp_rank: int, tp_size: int) -> Statement:
    """Reads a peer's agent metadata, believing nothing of it.

    Raises:
        PeerRefused: a number is missing, negative, or of no meaning.
    """
    addresses = _numbers("kv_caches_base_addr", metadata.kv_caches_base_addr, least=0)
    if hasattr(metadata, "block_len"):  # to 0.10.2
        block_bytes = _numbers("block_len", [metadata.block_len] * len(addresses))
    else:
        block_bytes = _numbers("block_lens", metadata.block_lens)
    strides = getattr(metadata, "block_strides", None)  # from 0.29
    stride_bytes = block_bytes if strides is None else _numbers("block_strides", strides)
    if not len(addresses) == len(block_bytes) == len(stride_bytes) > 0:
        raise PeerRefused(
            f"a peer's handshake has {len(addresses)} addresses, {len(block_bytes)} block lengths "
            f"and {len(stride_bytes)} strides: expected one of each per region"
        )
    for length, stride in zip(block_bytes, stride_bytes, strict=True):
        if stride < length:
            raise PeerRefused(
                f"a peer's handshake has blocks of {length} bytes every {stride} bytes, which "
                "overlap"
            )
    counts = getattr(metadata, "region_num_blocks", None)  # from 0.30
    blocks = _number("num_blocks", metadata.num_blocks)
    if counts is not None:
        blocks = min((blocks, *_numbers("region_num_blocks", counts)))
    block_tokens = _optional("block_size", metadata)  # from 0.11.1
    parts = _optional("physical_blocks_per_logical_kv_block", metadata)  # from 0.21
    if (parts or 1) > blocks or (block_tokens or 1) * (parts or 1) > _MOST_TOKENS:
        raise PeerRefused(
            f"a peer's handshake has blocks of {parts} times {block_tokens} tokens, {blocks} of "
            f"the smaller ones: expected no more parts than there are, and {_MOST_TOKENS} tokens "
            "at most"
        )
    return Statement(
        engine_id=str(metadata.engine_id),
        tp_rank=_number("tp_rank", tp_rank, least=0),
        tp_size=_number("tp_size", tp_size),
        block_tokens=block_tokens,
        kernel_blocks_per_block=parts,
        layout=_text("kv_cache_layout", metadata),  # from 0.10.1
        blocks=blocks,
        addresses=addresses,
        block_bytes=block_bytes,
        stride_bytes=stride_bytes,
        backend=_text("attn_backend_name", metadata),  # absent in 0.13 to 0.19
        # Up to 0.11.0 descriptors carry the rank in its place.
        device_id=_number("device_id", getattr(metadata, "device_id", tp_rank), least=0),
        region_names=_names("region_names", metadata),  # from 0.30
        memory_kind=_memory_kind(metadata),
    )


def as_alike(
    metadata: Any,
    statement: Statement,
    block_tokens: int,
    kernel_blocks_per_block: int,
    layout: str,
    block_bytes: tuple[int, ...],
) -> Any:
    """A copy of a peer's metadata that describes the same memory in our geometry.

    The release then prepares and books what it does for a peer like us, within
    what the peer registered; which bytes a read moves is decided elsewhere.

    Raises:
        PeerRefused: a region of the peer's is smaller than one of our blocks.
    """
    alike = copy.copy(metadata)
    room = [
        ((statement.blocks - 1) * stride + theirs) // ours
        for stride, theirs, ours in zip(
            statement.stride_bytes, statement.block_bytes, block_bytes, strict=True
        )
    ]
    if min(room) < 1:
        raise PeerRefused(
            f"engine {statement.engine_id} holds less than one of our blocks ({block_bytes[0]} "
            f"bytes) in a region: {statement}; give it more KV cache"
        )
    alike.num_blocks = min(room)
    stated = {
        "block_len": block_bytes[0],
        "block_lens": list(block_bytes),
        "block_strides": list(block_bytes),
        "block_size": block_tokens,
        "kv_cache_layout": layout,
        "physical_blocks_per_logical_kv_block": kernel_blocks_per_block,
        "region_num_blocks": [min(room)] * len(block_bytes),
    }
    for name, value in stated.items():
        if getattr(metadata, name, None) is not None:
            setattr(alike, name, value)
    return alike


def _text(name: str, metadata: Any) -> str | None:
    found = getattr(metadata, name, None)
    if found is not None and not isinstance(found, str):
        raise PeerRefused(f"a peer's handshake has {name}={found!r}: expected a name")
    return found


def _optional(name: str, metadata: Any) -> int | None:
    found = getattr(metadata, name, None)
    return None if found is None else _number(name, found)


def _names(name: str, metadata: Any) -> tuple[str, ...] | None:
    found = getattr(metadata, name, None)
    if found is None:
        return None
    if not isinstance(found, (list, tuple)) or not all(isinstance(n, str) for n in found):
        raise PeerRefused(f"a peer's handshake has {name}={found!r}: expected a list of names")
    return tuple(found)


def _memory_kind(metadata: Any) -> Literal["DRAM", "VRAM"] | None:
    kinds = set(_names("region_mem_types", metadata) or ())  # from 0.30
    if kinds == {"DRAM"}:
        return "DRAM"
    if kinds == {"VRAM"}:
        return "VRAM"
    if kinds:
        raise PeerRefused(
            f"engine {metadata.engine_id} cannot be read: its regions lie in memory of the kinds "
            f"{', '.join(sorted(kinds))}: keep its whole KV cache on one device or on the host"
        )
    return None


def _numbers(name: str, found: Any, least: int = 1) -> tuple[int, ...]:
    if not isinstance(found, (list, tuple)):
        raise PeerRefused(f"a peer's handshake has {name}={found!r}, which is no list")
    return tuple(_number(name, number, least) for number in found)


def _number(name: str, found: Any, least: int = 1) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 63:
        raise PeerRefused(
            f"a peer's handshake has {name}={found!r}: expected a whole number of {least} or more"
        )
    return found
