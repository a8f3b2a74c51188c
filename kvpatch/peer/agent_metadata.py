"""The form in which a peer's handshake states its cache, one form for all releases."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import CacheShape, ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import inner_layout
from kvpatch.peer.cross_layer_form import CrossLayerForm, form_in, without_form
from kvpatch.peer.peer_hash import Explanation

#: No engine has blocks as large; a peer that says so would have us list their parts.
MOST_TOKENS = 1 << 20
_ONE_VERSION = "use one vLLM and one kvpatch on both sides"


@dataclass(frozen=True)
class StatedBlocks:
    """The form of blocks that P's kvpatch states, because the release's handshake does not.

    Attributes:
        block_tokens: the tokens of one of the blocks that ids count.
        kernel_tokens: the tokens of a kernel block; `block_tokens` is a multiple of it.
        layout: HND or NHD, where the release states none (0.10.0); else None.
        dtype: the type of keys and values, by a name of ``--kv-cache-dtype``; empty if not stated.
    """

    block_tokens: int
    kernel_tokens: int
    layout: str | None = None
    dtype: str = ""


@dataclass(frozen=True)
class AgentMetadata:
    """The cache that one rank of a peer states.

    Attributes:
        block_tokens: the tokens of a kernel block; None where the release does not say.
        kernel_blocks_per_block: kernel blocks in one of the blocks that ids count; None
            where the release does not say.
        layout: the name that was sent; None where the release does not say.
        blocks: kernel blocks in each region.
        addresses: where each region starts.
        block_bytes: the bytes of one kernel block in each region.
        stride_bytes: from one kernel block of a region to the next.
        backend: the attention backend's name; None where the release does not say.
        region_names: the layer that each region is named after; None where it does not say.
        memory_kind: of all regions, in NIXL's words; None where the release does not say.
        packed_layers: (layer, offset, bytes) of each layer that it says to lie in cross-layer
            blocks (MLA, from 0.31); empty where it says nothing.
        form: what its only region's blocks look like, where they are cross-layer blocks that
            kvpatch registered; else None.
        state_bytes: the bytes of each recurrent state of a layer (from 0.18); empty where it says
            nothing.
        shares_tokens: whether its ranks share out the tokens of a block (from 0.29).
        named: how its engine differs from ours, by its hash; None where it has ours, or none.
        releases: the releases that it may be of, if all of them shake hands in another form than
            ours; else empty.
        cache_shape: how its tensors begin, where it is of another release or has a backend whose
            blocks are another's; None for as ours, and where that is not known.
        key_order: how its keys lie in a block, where it has such a backend, or where a CPU's are
            known; None for as ours.
        stated_keys: how its keys lie, as its own kvpatch states; None where it states nothing.
        stated_blocks: the blocks that its own kvpatch states; None where it states nothing, and
            where this worker has not asked.
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
    form: CrossLayerForm | None = None
    state_bytes: tuple[int, ...] = ()
    shares_tokens: bool = False
    named: Explanation | None = None
    releases: tuple[str, ...] = ()
    cache_shape: CacheShape | None = None
    key_order: KeyOrder | None = None
    stated_keys: KeyOrder | None = None
    stated_blocks: StatedBlocks | None = None

    @property
    def inner_layout(self) -> str | None:
        """HND or NHD; None where a layer's block is not in one piece of its own."""
        if self.form is not None:
            return self.form.inner_layout
        return inner_layout(self.layout)

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_tokens} tokens, layout {self.layout}, rank {self.tp_rank} of "
            f"{self.tp_size}, {self.blocks} blocks in {len(self.addresses)} regions of "
            f"{sorted(set(self.block_bytes))} bytes a block"
        )


def read_agent_metadata(
    metadata: Any, facts: ReleaseFacts, tp_rank: int, tp_size: int
) -> AgentMetadata:
    """Reads a peer's agent metadata, and refuses numbers that cannot be true."""
    fields = _Fields(metadata, facts)
    addresses, block_bytes, stride_bytes = _regions(fields)
    blocks = fields.number("num_blocks")
    if fields.has("region_num_blocks"):
        blocks = min((blocks, *fields.numbers("region_num_blocks")))
    layout, backend = fields.text("kv_cache_layout"), fields.text("attn_backend_name")
    form = form_in(layout, backend)
    if form is not None and len(addresses) != 1:
        raise PeerRefused(
            f"a peer has rows of all layers in {len(addresses)} regions: expected 1", _ONE_VERSION
        )
    if form is None:
        block_tokens = fields.optional_number("block_size")
        parts = fields.optional_number("physical_blocks_per_logical_kv_block")
    else:
        block_tokens, parts = form.block_tokens, form.kernel_blocks_per_block
    if (parts or 1) > blocks or (block_tokens or 1) * (parts or 1) > MOST_TOKENS:
        raise PeerRefused(
            f"a peer's handshake has blocks of {parts} times {block_tokens} tokens, {blocks} of "
            f"the smaller ones: expected no more parts than there are, and {MOST_TOKENS} tokens "
            "at most",
            _ONE_VERSION,
        )
    return AgentMetadata(
        engine_id=str(metadata.engine_id),
        tp_rank=_number("tp_rank", tp_rank, least=0),
        tp_size=_number("tp_size", tp_size),
        block_tokens=block_tokens,
        kernel_blocks_per_block=parts,
        # 0.10.0 states no layout, but cross-layer blocks say theirs there too.
        layout=layout if form is None else str(form),
        blocks=blocks,
        addresses=addresses,
        block_bytes=block_bytes,
        stride_bytes=stride_bytes,
        backend=without_form(backend),
        # In releases <= 0.11.0 descriptors carry the rank in its place.
        device_id=fields.number("device_id", least=0) if fields.exists("device_id") else tp_rank,
        region_names=fields.names("region_names"),
        memory_kind=_memory_kind(fields),
        packed_layers=_packed_layers(fields),
        form=form,
        state_bytes=state_bytes_of(metadata, facts),
    )


def state_bytes_of(metadata: Any, facts: ReleaseFacts) -> tuple[int, ...]:
    """Returns the bytes of each recurrent state of a layer; none where it is silent (<= 0.17)."""
    fields = _Fields(metadata, facts)
    return fields.numbers("ssm_sizes", least=0) if fields.has("ssm_sizes") else ()


def restated(metadata: Any, facts: ReleaseFacts, stated: Mapping[str, Any]) -> Any:
    """A copy of a worker's metadata with other values in the fields that it fills."""
    found = copy.copy(metadata)
    for name in facts.agent_metadata & stated.keys():
        if getattr(metadata, name) is not None:
            setattr(found, name, stated[name])
    return found


@dataclass(frozen=True)
class _Fields:
    """A peer's metadata as the release's own class holds it; each field is checked."""

    metadata: Any
    facts: ReleaseFacts

    def exists(self, name: str) -> bool:
        """True if the release has such a field."""
        return name in self.facts.agent_metadata

    def has(self, name: str) -> bool:
        """True if the release has such a field and the peer fills it."""
        return self.exists(name) and getattr(self.metadata, name) is not None

    def text(self, name: str) -> str | None:
        found = getattr(self.metadata, name) if self.has(name) else None
        if found is not None and not isinstance(found, str):
            raise PeerRefused(
                f"a peer's handshake has {name}={shown(found)}: expected a name", _ONE_VERSION
            )
        return found

    def names(self, name: str) -> tuple[str, ...] | None:
        if not self.has(name):
            return None
        found = getattr(self.metadata, name)
        if not isinstance(found, (list, tuple)) or not all(isinstance(n, str) for n in found):
            raise PeerRefused(
                f"a peer's handshake has {name}={shown(found)}: expected a list of names",
                _ONE_VERSION,
            )
        return tuple(found)

    def number(self, name: str, least: int = 1) -> int:
        return _number(name, getattr(self.metadata, name), least)

    def optional_number(self, name: str) -> int | None:
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str, least: int = 1) -> tuple[int, ...]:
        return _numbers(name, getattr(self.metadata, name), least)


def _regions(fields: _Fields) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the address, the bytes of a block and the stride of each region, by column."""
    addresses = fields.numbers("kv_caches_base_addr", least=0)
    if fields.exists("block_len"):
        block_bytes = (fields.number("block_len"),) * len(addresses)
    else:
        block_bytes = fields.numbers("block_lens")
    stride_bytes = fields.numbers("block_strides") if fields.has("block_strides") else block_bytes
    if not len(addresses) == len(block_bytes) == len(stride_bytes) > 0:
        raise PeerRefused(
            f"a peer's handshake has {len(addresses)} addresses, {len(block_bytes)} block lengths "
            f"and {len(stride_bytes)} strides: expected one of each per region",
            _ONE_VERSION,
        )
    for length, stride in zip(block_bytes, stride_bytes, strict=True):
        if stride < length:
            raise PeerRefused(
                f"a peer's handshake has blocks of {length} bytes every {stride} bytes, which "
                "overlap",
                _ONE_VERSION,
            )
    return addresses, block_bytes, stride_bytes


def _packed_layers(fields: _Fields) -> tuple[tuple[str, int, int], ...]:
    found = fields.metadata.packed_member_layouts if fields.has("packed_member_layouts") else {}
    if not found:
        return ()
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(place, (list, tuple)) and len(place) == 2
        for name, place in found.items()
    ):
        raise PeerRefused(
            f"a peer's handshake has packed_member_layouts={shown(found)}: expected an offset and "
            "a length for each layer",
            _ONE_VERSION,
        )
    return tuple(
        (name, *_numbers("packed_member_layouts", place, least=0))
        for name, place in sorted(found.items())
    )


def _memory_kind(fields: _Fields) -> Literal["DRAM", "VRAM"] | None:
    kinds = set(fields.names("region_mem_types") or ())
    if kinds == {"DRAM"}:
        return "DRAM"
    if kinds == {"VRAM"}:
        return "VRAM"
    if kinds:
        raise PeerRefused(
            f"engine {fields.metadata.engine_id} cannot be read: its regions lie in memory of the "
            f"kinds {', '.join(sorted(kinds))}",
            "keep its whole KV cache on one device or on the host",
        )
    return None


def _numbers(name: str, found: Any, least: int = 1) -> tuple[int, ...]:
    if not isinstance(found, (list, tuple)):
        raise PeerRefused(
            f"a peer's handshake has {name}={shown(found)}, which is no list", _ONE_VERSION
        )
    return tuple(_number(name, number, least) for number in found)


def _number(name: str, found: Any, least: int = 1) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 63:
        raise PeerRefused(
            f"a peer's handshake has {name}={shown(found)}: expected a whole number of {least} or "
            "more",
            _ONE_VERSION,
        )
    return found
