"""What a peer says of its cache at the handshake, in one vocabulary for all generations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpatch.connector.handshake.cross_layer_form import RowForm, form_in, without_form
from kvpatch.core.errors import PeerRefused, UnknownForm
from kvpatch.core.text import shown
from kvpatch.geometry import inner_layout

#: No engine has blocks as large; a peer that says so would have us list their parts.
MOST_TOKENS = 1 << 20


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
        packed_layers: (layer, offset, bytes) of each layer that it says to lie in a row of
            all layers (MLA, from 0.31); empty where it says nothing.
        rows: what its only region's blocks look like, where they are rows of all layers
            that kvpatch registered; else None.
        state_bytes: of each recurrent state of a layer (from 0.18); empty where it says nothing.
        shares_tokens: whether its ranks share out the tokens of a block (from 0.29).
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
    packed_layers: tuple[tuple[str, int, int], ...] = ()
    rows: RowForm | None = None
    state_bytes: tuple[int, ...] = ()
    shares_tokens: bool = False

    @property
    def inner_layout(self) -> str | None:
        """HND or NHD; None where a layer's block is not in one piece of its own."""
        if self.rows is not None:
            return self.rows.inner_layout
        return inner_layout(self.layout)

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_tokens} tokens, layout {self.layout}, rank {self.tp_rank} of "
            f"{self.tp_size}, {self.blocks} blocks in {len(self.addresses)} regions of "
            f"{sorted(set(self.block_bytes))} bytes a block"
        )


def read_statement(metadata: Any, tp_rank: int, tp_size: int) -> Statement:
    """Reads a peer's agent metadata, believing nothing of it.

    Raises:
        PeerRefused: a number is missing, negative, or of no meaning.
    """
    addresses, block_bytes, stride_bytes = _regions(metadata)
    counts = getattr(metadata, "region_num_blocks", None)  # from 0.30
    blocks = _number("num_blocks", metadata.num_blocks)
    if counts is not None:
        blocks = min((blocks, *_numbers("region_num_blocks", counts)))
    rows = _rows(metadata)
    if rows is not None and len(addresses) != 1:
        raise PeerRefused(f"a peer has rows of all layers in {len(addresses)} regions: expected 1")
    block_tokens = _optional("block_size", metadata)  # from 0.11.1
    parts = _optional("physical_blocks_per_logical_kv_block", metadata)  # from 0.21
    if rows is not None:
        block_tokens, parts = rows.block_tokens, rows.kernel_blocks_per_block
    if (parts or 1) > blocks or (block_tokens or 1) * (parts or 1) > MOST_TOKENS:
        raise PeerRefused(
            f"a peer's handshake has blocks of {parts} times {block_tokens} tokens, {blocks} of "
            f"the smaller ones: expected no more parts than there are, and {MOST_TOKENS} tokens "
            "at most"
        )
    return Statement(
        engine_id=str(metadata.engine_id),
        tp_rank=_number("tp_rank", tp_rank, least=0),
        tp_size=_number("tp_size", tp_size),
        block_tokens=block_tokens,
        kernel_blocks_per_block=parts,
        # From 0.10.1; rows say theirs on 0.10.0 too.
        layout=_text("kv_cache_layout", metadata) if rows is None else str(rows),
        blocks=blocks,
        addresses=addresses,
        block_bytes=block_bytes,
        stride_bytes=stride_bytes,
        # Absent in 0.13 to 0.19.
        backend=without_form(_text("attn_backend_name", metadata)),
        # In releases <= 0.11.0 descriptors carry the rank in its place.
        device_id=_number("device_id", getattr(metadata, "device_id", tp_rank), least=0),
        region_names=_names("region_names", metadata),  # from 0.30
        memory_kind=_memory_kind(metadata),
        packed_layers=_packed_layers(metadata),
        rows=rows,
        state_bytes=_numbers("ssm_sizes", getattr(metadata, "ssm_sizes", ()), least=0),
    )


def _regions(metadata: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(address, bytes of a block, bytes from block to block) of the regions, by column."""
    addresses = _numbers("kv_caches_base_addr", metadata.kv_caches_base_addr, least=0)
    if hasattr(metadata, "block_len"):  # <= 0.10.2
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
    return addresses, block_bytes, stride_bytes


def as_alike(
    metadata: Any,
    statement: Statement,
    block_tokens: int,
    kernel_blocks_per_block: int,
    layout: str,
    block_bytes: tuple[int, ...],
    own: Mapping[str, Any] | None = None,
) -> Any:
    """A copy of a peer's metadata that describes the same memory in our geometry.

    The release then prepares and books what it does for a peer like us, within
    what the peer registered; which bytes a read moves is decided elsewhere. Where the
    peer has other regions than we do, all of ours are shown in the same memory.

    Args:
        block_bytes: of each of our regions, as the peer's would be.
        own: what this worker states of its own regions.

    Raises:
        PeerRefused: the peer registered less than one of our blocks.
    """
    alike = copy.copy(metadata)
    count = len(block_bytes)
    if count == len(statement.addresses):
        addresses = list(statement.addresses)
        spans = _spans(statement)
    else:
        start, length = _widest_span(statement, max(block_bytes))
        addresses, spans = [start] * count, [(start, length)] * count
    room = [length // block for (_, length), block in zip(spans, block_bytes, strict=True)]
    if min(room) < 1:
        raise PeerRefused(
            f"engine {statement.engine_id} holds less than one of our blocks ({max(block_bytes)} "
            f"bytes) in a region: {statement}; give it more KV cache"
        )
    alike.num_blocks = min(room)
    stated: dict[str, Any] = {
        "block_len": block_bytes[0],
        "block_lens": list(block_bytes),
        "block_strides": list(block_bytes),
        "block_size": block_tokens,
        "kv_cache_layout": layout,
        "physical_blocks_per_logical_kv_block": kernel_blocks_per_block,
        "region_num_blocks": [min(room)] * count,
        "kv_caches_base_addr": addresses,
        "attn_backend_name": statement.backend,
        **(own or {}),
    }
    if statement.memory_kind is not None:
        stated["region_mem_types"] = [statement.memory_kind] * count
    for name, value in stated.items():
        if getattr(metadata, name, None) is not None:
            setattr(alike, name, value)
    return alike


def of_blocks(metadata: Any, most_blocks: int) -> Any:
    """A copy of metadata with no more than so many blocks in any region."""
    fewer = copy.copy(metadata)
    fewer.num_blocks = min(metadata.num_blocks, most_blocks)
    counts = getattr(metadata, "region_num_blocks", None)  # from 0.30
    if counts is not None:
        fewer.region_num_blocks = [min(count, most_blocks) for count in counts]
    return fewer


def _spans(statement: Statement) -> list[tuple[int, int]]:
    """(start, bytes) of each region, its last block without what follows it in its row."""
    return [
        (start, (statement.blocks - 1) * stride + length)
        for start, stride, length in zip(
            statement.addresses, statement.stride_bytes, statement.block_bytes, strict=True
        )
    ]


def _widest_span(statement: Statement, enough_bytes: int) -> tuple[int, int]:
    """(start, bytes) of the most memory in one piece that the peer registered.

    Regions that overlap are one allocation; those that touch may be two, so they are
    taken together only where less is not enough.
    """
    widest = (0, 0)
    for least_overlap in (1, 0):
        start = end = 0
        for address, length in sorted(_spans(statement)):
            if address + least_overlap > end:
                start, end = address, address + length
            end = max(end, address + length)
            if end - start > widest[1]:
                widest = (start, end - start)
        if widest[1] >= enough_bytes:
            break
    return widest


def _rows(metadata: Any) -> RowForm | None:
    try:
        return form_in(_text("kv_cache_layout", metadata), _text("attn_backend_name", metadata))
    except UnknownForm as error:
        raise PeerRefused(str(error)) from error


def _packed_layers(metadata: Any) -> tuple[tuple[str, int, int], ...]:
    found = getattr(metadata, "packed_member_layouts", None)  # from 0.31
    if not found:
        return ()
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(place, (list, tuple)) and len(place) == 2
        for name, place in found.items()
    ):
        raise PeerRefused(
            f"a peer's handshake has packed_member_layouts={shown(found)}: expected an offset and "
            "a length for each layer"
        )
    return tuple(
        (name, *_numbers("packed_member_layouts", place, least=0))
        for name, place in sorted(found.items())
    )


def _text(name: str, metadata: Any) -> str | None:
    found = getattr(metadata, name, None)
    if found is not None and not isinstance(found, str):
        raise PeerRefused(f"a peer's handshake has {name}={shown(found)}: expected a name")
    return found


def _optional(name: str, metadata: Any) -> int | None:
    found = getattr(metadata, name, None)
    return None if found is None else _number(name, found)


def _names(name: str, metadata: Any) -> tuple[str, ...] | None:
    found = getattr(metadata, name, None)
    if found is None:
        return None
    if not isinstance(found, (list, tuple)) or not all(isinstance(n, str) for n in found):
        raise PeerRefused(f"a peer's handshake has {name}={shown(found)}: expected a list of names")
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
        raise PeerRefused(f"a peer's handshake has {name}={shown(found)}, which is no list")
    return tuple(_number(name, number, least) for number in found)


def _number(name: str, found: Any, least: int = 1) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 63:
        raise PeerRefused(
            f"a peer's handshake has {name}={shown(found)}: expected a whole number of {least} or "
            "more"
        )
    return found
