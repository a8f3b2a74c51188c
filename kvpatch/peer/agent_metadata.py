"""The form in which a peer's handshake states its cache, one form for all releases.

No release has a field for cross-layer blocks. The layout's name carries them, which every release
from 0.11.1 on compares with its own, and the attention backend's, which those <= 0.12 compare: a
peer that does not know the words refuses the handshake.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NoReturn

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import CacheShape, ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.geometry.cross_layer_blocks import LAYER_AXES
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import Axes, InnerLayout, inner_layout, inner_layout_of_axes
from kvpatch.peer.peer_hash import Explanation

#: No engine has blocks as large; a peer that says so would have us list their parts.
MOST_TOKENS = 1 << 20
_ONE_VERSION = "use one vLLM and one kvpatch on both sides"

_WORD = "kvpatch_rows"
_LETTERS = {"kv": "K", "token": "N", "head": "H", "channel": "C"}
_BY_LETTERS = {"".join(_LETTERS[axis] for axis in axes): axes for axes in LAYER_AXES}
_FORM = re.compile(rf"{_WORD}:([1-9]\d{{0,6}})x([1-9]\d{{0,6}}):([A-Z]+)(?::([0-9a-f]{{16}}))?")


@dataclass(frozen=True)
class CrossLayerForm:
    """The form of a cross-layer block, without its sizes.

    Attributes:
        block_tokens: the tokens of a kernel block; a cross-layer block holds one.
        kernel_blocks_per_block: cross-layer blocks in one of the blocks that ids count.
        axes: the axes of each layer's part.
        places: :func:`places_digest`, so that both sides have the same layers in one place;
            or :func:`packed_digest`.
    """

    block_tokens: int
    kernel_blocks_per_block: int
    axes: Axes
    places: str = ""

    def __str__(self) -> str:
        letters = "".join(_LETTERS[axis] for axis in self.axes)
        places = f":{self.places}" if self.places else ""
        return f"{_WORD}:{self.kernel_blocks_per_block}x{self.block_tokens}:{letters}{places}"

    @property
    def inner_layout(self) -> InnerLayout:
        """HND or NHD; HND where there are no heads."""
        return inner_layout_of_axes(self.axes)


def places_digest(places: Sequence[Sequence[str]]) -> str:
    """Returns a digest of the layers that share a place; empty where none do."""
    if all(len(layers) == 1 for layers in places):
        return ""
    return sha256(json.dumps([sorted(layers) for layers in places]).encode()).hexdigest()[:16]


def packed_digest(groups: Sequence[Sequence[str]]) -> str:
    """Returns a digest of the layers that each group has side by side."""
    told = json.dumps(["packed", *(list(layers) for layers in groups)])
    return sha256(told.encode()).hexdigest()[:16]


def form_in(*texts: str | None) -> CrossLayerForm | None:
    """Returns the form that a handshake's names state; None where they are a release's own."""
    for text in texts:
        if text is None or _WORD not in text:
            continue
        found = _FORM.search(text)
        if found is None or found[3] not in _BY_LETTERS:
            raise PeerRefused(
                f"a peer's blocks are said to be rows of all layers of the form {text!r}: "
                f"expected one of {', '.join(_BY_LETTERS)}",
                "use one kvpatch on both sides",
            )
        axes = _BY_LETTERS[found[3]]
        return CrossLayerForm(int(found[2]), int(found[1]), axes, found[4] or "")
    return None


def without_form(text: str | None) -> str | None:
    """A backend's name as the release has it."""
    return None if text is None else text.partition(f" {_WORD}")[0]


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
        block_bytes: the bytes of one kernel block in each region.
        stride_bytes: from one kernel block of a region to the next.
        backend: the attention backend's name; None where the release does not say.
        region_names: the layer that each region is named after; None where it does not say.
        memory_kinds: of its regions, in NIXL's words; none where the release does not say.
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
        stated_layout: the layout of its memory that its own kvpatch states, likewise.
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
    memory_kinds: tuple[str, ...] = ()
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
    stated_layout: object = None

    def of_layers(self, names: Collection[str]) -> AgentMetadata:
        """Returns the peer with those of its regions alone that are named after these layers.

        A layer that it says to lie in cross-layer blocks is a region too. The peer as it is where
        it does not say where one of these layers lies.
        """
        theirs = self.region_names or ()
        packed = {layer: (offset, size) for layer, offset, size in self.packed_layers}
        rows = [n for n, name in enumerate(theirs) if name in packed]
        if len(theirs) != len(self.addresses) or len(rows) != bool(packed):
            return self
        regions = [(n, 0, self.block_bytes[n]) for n in range(len(theirs)) if n not in rows]
        told = [theirs[n] for n, *_ in regions] + [*packed]
        regions += [(row, *place) for row in rows for place in packed.values()]
        escapes = any(offset + size > self.block_bytes[n] for n, offset, size in regions)
        if escapes or not set(names) <= {*told}:
            return self
        found = [one for one, name in zip(regions, told, strict=True) if name in names]
        return replace(
            self,
            addresses=tuple(self.addresses[n] + offset for n, offset, _ in found),
            block_bytes=tuple(size for *_, size in found),
            stride_bytes=tuple(self.stride_bytes[n] for n, *_ in found),
            region_names=tuple(name for name in told if name in names),
            packed_layers=(),
        )

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

    def stated(name: str) -> Any:  # None where the release has no such field, or P leaves it empty
        return getattr(metadata, name) if name in facts.agent_metadata else None

    addresses, block_bytes, stride_bytes = _regions(stated)
    counts = _numbers("region_num_blocks", stated("region_num_blocks") or ())
    blocks = min((_number("num_blocks", stated("num_blocks")), *counts))
    layout, backend = (_text(n, stated(n)) for n in ("kv_cache_layout", "attn_backend_name"))
    form = form_in(layout, backend)
    if form is not None and len(addresses) != 1:
        raise PeerRefused(
            f"a peer has rows of all layers in {len(addresses)} regions: expected 1", _ONE_VERSION
        )
    if form is None:
        block_tokens, parts = (
            None if stated(name) is None else _number(name, stated(name))
            for name in ("block_size", "physical_blocks_per_logical_kv_block")
        )
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
        device_id=_number("device_id", metadata.device_id, least=0)
        if "device_id" in facts.agent_metadata
        else tp_rank,
        region_names=_names("region_names", stated("region_names")),
        memory_kinds=tuple(
            sorted({*(_names("region_mem_types", stated("region_mem_types")) or ())})
        ),
        packed_layers=_packed_layers(stated("packed_member_layouts")),
        form=form,
        state_bytes=_numbers("ssm_sizes", stated("ssm_sizes") or (), least=0),
    )


def restated(metadata: Any, facts: ReleaseFacts, stated: Mapping[str, Any]) -> Any:
    """A copy of a worker's metadata with other values in the fields that it fills."""
    found = copy.copy(metadata)
    for name in facts.agent_metadata & stated.keys():
        if getattr(metadata, name) is not None:
            setattr(found, name, stated[name])
    return found


def _regions(stated: Callable[[str], Any]) -> tuple[tuple[int, ...], ...]:
    """Returns the address, the bytes of a block and the stride of each region, by column."""
    addresses = _numbers("kv_caches_base_addr", stated("kv_caches_base_addr"), least=0)
    one = stated("block_len")  # <= 0.10.2
    lengths = stated("block_lens") if one is None else (one,) * len(addresses)
    block_bytes = _numbers("block_lens", lengths)
    strides = stated("block_strides")
    stride_bytes = block_bytes if strides is None else _numbers("block_strides", strides)
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


def _packed_layers(found: Any) -> tuple[tuple[str, int, int], ...]:
    name, is_map = "packed_member_layouts", isinstance(found or {}, Mapping)
    stated: Mapping[Any, Any] = found if found and is_map else {}
    places = {layer: _numbers(name, of, least=0) for layer, of in stated.items()}
    if not is_map or not all(isinstance(n, str) and len(of) == 2 for n, of in places.items()):
        _refuse(name, found, "an offset and a length for each layer")
    return tuple((layer, *place) for layer, place in sorted(places.items()))


def _text(name: str, found: Any) -> str | None:
    if found is not None and not isinstance(found, str):
        _refuse(name, found, "a name")
    return found


def _names(name: str, found: Any) -> tuple[str, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list | tuple) or not all(isinstance(n, str) for n in found):
        _refuse(name, found, "a list of names")
    return tuple(found)


def _numbers(name: str, found: Any, least: int = 1) -> tuple[int, ...]:
    if not isinstance(found, list | tuple):
        _refuse(name, found, "a list")
    return tuple(_number(name, number, least) for number in found)


def _number(name: str, found: Any, least: int = 1) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 63:
        _refuse(name, found, f"a whole number of {least} or more")
    return found


def _refuse(name: str, found: Any, expected: str) -> NoReturn:
    raise PeerRefused(
        f"a peer's handshake has {name}={shown(found)}: expected {expected}", _ONE_VERSION
    )
