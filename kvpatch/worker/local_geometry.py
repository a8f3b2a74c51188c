"""Local geometry: what a worker registered, read back from it after the registration."""

from __future__ import annotations

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.cross_layer_blocks import places_of
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import (
    LAYER_BY_LAYER,
    LAYERS_INSIDE_BLOCKS,
    NAMED_LAYOUTS,
    InnerLayout,
    inner_layout,
    inner_layout_of_axes,
    layer_by_layer,
)
from kvpatch.geometry.plane import Content, Memory, Plane
from kvpatch.worker.cache_kinds import Holds
from kvpatch.worker.kv_cache_groups import packed_groups, reserves_slots, transferred_groups
from kvpatch.worker.registered_caches import (
    LayerCache,
    backend_of_layer,
    differ_in_shape,
    page_bytes_of,
)
from kvpatch.worker.release_worker import ReleaseWorker

if TYPE_CHECKING:
    from kvpatch.worker.recurrent_state import StatePages

_LOG = logging.getLogger("kvpatch.registration")


KVSplit = Literal["together", "apart"]
"""Whether keys and values of a block are in one region, or in two."""

#: Blocks of more tokens are not looked for.
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class KernelBlockSizes:
    """How a release cuts blocks: whole where all backends take them, else into the largest
    size that all take.

    Handshakes of 0.11.1 to 0.20 state the tokens of a kernel block, and not how many a block is cut
    into; block ids count blocks. P's kvpatch states it, or the operator declares it.

    Attributes:
        exact: per backend, the sizes that it takes.
        multiples: per backend, numbers whose multiples it takes.
        blocks: the sizes of blocks that the release allows; None for any.
    """

    exact: tuple[tuple[int, ...], ...]
    multiples: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...] | None = None

    def parts(self, kernel_tokens: int) -> tuple[int, ...]:
        """Returns the possible numbers of kernel blocks, of a given size, in a block."""
        if not self.cuts_some:
            return (1,)  # also of a size that this release does not allow
        most = max(_MOST_TOKENS // kernel_tokens, 1)
        every = tuple(range(1, most + 1))
        found = tuple(n for n in every if self.kernel_of(kernel_tokens * n) == kernel_tokens)
        # No block comes to this: its backend is not quite ours, and any is possible.
        return found or every

    @property
    def cuts_some(self) -> bool:
        return any(self.exact)

    def kernel_of(self, block_tokens: int) -> int | None:
        """Returns the tokens of a block's kernel blocks; None for a block that is not allowed."""
        if self.blocks is not None and block_tokens not in self.blocks:
            return None
        if self._takes(block_tokens):
            return block_tokens
        sizes = sorted({size for taken in self.exact for size in taken}, reverse=True)
        return next((n for n in sizes if block_tokens % n == 0 and self._takes(n)), None)

    def _takes(self, tokens: int) -> bool:
        return all(
            tokens in exact or any(tokens % base == 0 for base in bases)
            for exact, bases in zip(self.exact, self.multiples, strict=True)
        )


def kernel_block_sizes(release: ReleaseWorker) -> KernelBlockSizes | None:
    """Returns how a release cuts blocks for the worker's backends; None if that is unknown.

    Nobody asks <= 0.11.0, where no block is cut, and from 0.21 on, where the handshake says it.
    """
    facts = release.facts
    if not facts.states_block_size or facts.states_kernel_blocks:
        return None
    from vllm.config import cache, set_current_vllm_config

    exact: list[tuple[int, ...]] = []
    multiples: list[tuple[int, ...]] = []
    with set_current_vllm_config(release.worker.vllm_config):
        for backend in release.backends:
            sizes = (
                backend.get_supported_kernel_block_sizes()
                if facts.asks_for_kernel_sizes
                else backend.supported_kernel_block_sizes
            )
            if sizes is None:
                return None
            exact.append(tuple(size for size in sizes if isinstance(size, int)))
            multiples.append(tuple(size.base for size in sizes if not isinstance(size, int)))
    allowed = get_args(cache.BlockSize) if facts.lists_block_sizes else ()
    return KernelBlockSizes(tuple(exact), tuple(multiples), tuple(allowed) or None)


@dataclass(frozen=True)
class LocalGeometry:
    """The cache that this worker registered, as far as a peer's cache is read against it.

    Attributes:
        addresses: where each region starts, in the order that the peer uses too.
        block_tokens: tokens of a kernel block.
        kernel_blocks_per_block: kernel blocks in one of the blocks that ids count.
        layout: its name, as it is sent to peers.
        inner_layout: HND or NHD, whatever it is called: that of a like engine with several heads a
            rank too, where ours has one, whose blocks are the same bytes in both.
        total_heads: KV heads of the whole model.
        named_heads: the numbers of KV heads that the model's configuration names for some layers.
        has_draft: True if a model drafts tokens, whose own layers may be whole on each rank.
        key_order: COLUMN_MAJOR on the CPU backend, or TILED where its processor has AMX.
        tiles_on_amx: whether the CPU backend has such items in tiles there.
        dtype: of keys and values, in the words of ``--kv-cache-dtype``; empty where nobody asks.
        region_names: the layer that each region is named after; None in releases <= 0.29.
        readers: the layers for whose blocks the release reads each region, None for all; empty
            where that is so of all regions (<= 0.29, one region, recurrent state).
        units: the layers of each tensor, in the order in which tensors are handed to the
            registration; None in releases <= 0.28, and where keys and values are regions of their
            own.
        cross_layer_groups: each group's layers as they follow one another in a cross-layer block,
            on both sides; None where that is not known.
        kernel_sizes: how the release cuts blocks; None where that is not known.
        groups: the layers of each block table; None where there is one.
        kv_split: whether keys and values are in one region, or in two, where the backend's own
            blocks hold both, one behind the other; None where they do not.
        misreads_blocks: whether block sizes that peers state are none (CPU, <= 0.11.2).
        planned_layout: what the release would have stated of tensors to which an allocator has
            given another layout, which is the one that is stated; else None.
        cross_layer_places: what cross-layer blocks like ours state of their places, where they
            hold recurrent state.
        states: the pages of each layer with recurrent state, as they were registered.
        state_bytes: of each state of a layer, as a handshake states them; empty where it does not.
        backends: the names of all layers' attention backends; none in releases <= 0.11.0.
        uses_mla: True if the model's attention is MLA; a draft model's may have heads.
    """

    layers: Mapping[str, LayerCache]
    addresses: tuple[int, ...]
    block_bytes: tuple[int, ...]
    block_tokens: int
    kernel_blocks_per_block: int
    layout: str
    inner_layout: str
    total_heads: int
    tp_rank: int
    tp_size: int
    memory: Memory
    backend: str
    key_order: KeyOrder
    facts: ReleaseFacts
    region_names: tuple[str, ...] | None = None
    readers: tuple[frozenset[str] | None, ...] = ()
    units: tuple[tuple[str, ...], ...] | None = None
    cross_layer_groups: tuple[tuple[str, ...], ...] | None = None
    kernel_sizes: KernelBlockSizes | None = None
    groups: tuple[frozenset[str], ...] | None = None
    kv_split: KVSplit | None = None
    misreads_blocks: bool = False
    planned_layout: str | None = None
    cross_layer_places: str | None = None
    states: Mapping[str, StatePages] = field(default_factory=dict)
    state_bytes: tuple[int, ...] = ()
    backends: frozenset[str] = frozenset()
    uses_mla: bool = False
    tiles_on_amx: bool = True
    dtype: str = ""
    named_heads: frozenset[int] = frozenset()
    has_draft: bool = False

    @cached_property
    def has_heads(self) -> bool:
        """True if ranks hold heads; the latents of MLA are whole on each."""
        return any(layer.has_heads for layer in self.layers.values())

    @cached_property
    def has_latents(self) -> bool:
        return not all(layer.has_heads for layer in self.layers.values())

    @property
    def item_bytes(self) -> int:
        """Returns the bytes of one element of the first layer."""
        return next(iter(self.layers.values())).planes[0].item_bytes

    @cached_property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The attention layers at each place of a cross-layer block like ours."""
        groups = self.groups or (self.layers.keys(),)
        return places_of([group & self.layers.keys() for group in groups])

    @cached_property
    def layers_differ_in_shape(self) -> bool:
        """True if the heads, tokens or widths of our layers differ from one another.

        So too where layers beside latents have other heads than the model: a draft model's.
        """
        models = max(1, self.total_heads // self.tp_size)
        firsts = [layer.planes[0] for layer in self.layers.values()]
        heads = {plane.counts.heads for plane in firsts if plane.content is Content.KEY}
        return differ_in_shape(self.layers) or (self.has_latents and not heads <= {models})

    def totals_of(self, own: int) -> set[int]:
        """Returns the possible KV heads on all ranks of a layer that has `own` on each."""
        return totals_of(own, self.tp_size, {self.total_heads, *self.named_heads})

    def total_of(self, own: int) -> int:
        """Returns the one of them by which `number_heads` has numbered ours."""
        return total_of(own, self.tp_size, self.total_heads, self.named_heads)

    @cached_property
    def heads_of_layers(self) -> frozenset[tuple[int, int]]:
        """The KV heads that each layer of rows may have on all ranks, and those of a rank."""
        firsts = [
            layer.planes[0] for layer in self.layers.values() if layer.kind.holds is Holds.ROWS
        ]
        heads = {plane.counts.heads for plane in firsts if plane.content is Content.KEY}
        return frozenset((total, own) for own in heads for total in self.totals_of(own))

    @cached_property
    def misses_pages(self) -> bool:
        """True if the release would read less of a layer's blocks than they hold.

        From 0.30 on layers of several groups that begin in one place of a block have the region
        of one of them, whose pages may be the smaller, or which may be of another group.
        """
        if self.layout not in LAYERS_INSIDE_BLOCKS:
            return False
        return missed_page(self.pages, self.addresses, self.block_bytes, self.readers) is not None

    @property
    def pages(self) -> dict[str, tuple[int, int]]:
        """By layer, where its first page begins, and its bytes."""
        return {n: (c.planes[0].address, page_bytes_of(c)) for n, c in self.layers.items()}

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_tokens} tokens, layout {self.layout}, rank {self.tp_rank} of "
            f"{self.tp_size}, {len(self.addresses)} regions"
        )


def local_geometry_of(
    release: ReleaseWorker, layers: Mapping[str, LayerCache], key_order: KeyOrder
) -> LocalGeometry:
    """Returns what a worker has registered of `layers`, as the release was shown them."""
    worker, facts = release.worker, release.facts
    inner_layout = layout_shown_by(layers) or layout_of_backends(release, layers) or "HND"
    layout = release.stated_layout or inner_layout
    units = units_of(layers) if layout in NAMED_LAYOUTS else None
    return LocalGeometry(
        layers=layers,
        addresses=release.addresses,
        block_bytes=release.region_block_bytes,
        block_tokens=int(worker.block_size),
        kernel_blocks_per_block=release.kernel_blocks_per_block,
        layout=layout,
        inner_layout=inner_layout,
        total_heads=int(worker.model_config.get_total_num_kv_heads()),
        named_heads=named_heads_of(worker.vllm_config),
        has_draft=reserves_slots(worker.vllm_config),
        tp_rank=int(worker.tp_rank),
        tp_size=int(worker.world_size),
        memory=Memory(
            worker.nixl_memory_type if facts.has_host_buffer else "VRAM",
            worker.device_id if facts.states_device else worker.tp_rank,
        ),
        backend=str(worker.backend_name),
        backends=frozenset(backend.get_name() for backend in release.backends),
        uses_mla=bool(worker.use_mla),
        key_order=key_order,
        tiles_on_amx=release.tiles_on_amx,
        dtype="" if facts.states_kernel_blocks else release.cache_dtype,
        state_bytes=release.state_bytes,
        facts=facts,
        region_names=(tuple(worker.region_names) or None) if facts.names_regions else None,
        readers=readers_of_regions(release),
        units=units,
        cross_layer_groups=(
            None if units is None else cross_layer_groups_of(release, layers, layout)
        ),
        kernel_sizes=kernel_block_sizes(release),
    )


def readers_of_regions(release: ReleaseWorker) -> tuple[frozenset[str] | None, ...]:
    """Returns the layers for whose blocks each region is read, None for all; empty if all are."""
    worker, facts = release.worker, release.facts
    if not facts.names_regions or worker._has_mamba or not worker._uses_region_group_mapping:
        return ()
    groups = transferred_groups(worker.kv_cache_config, facts)
    layers = [frozenset(group.layer_names) for group in groups]
    return tuple(None if number < 0 else layers[number] for number in worker.region_group_ids)


def missed_page(
    pages: Mapping[str, tuple[int, int]],
    addresses: Sequence[int],
    block_bytes: Sequence[int],
    readers: Sequence[frozenset[str] | None],
) -> str | None:
    """Returns a layer whose page is in no region that is read for its blocks.

    Args:
        pages: by layer, where its first page begins, and its bytes.
        readers: as of :class:`LocalGeometry`.
    """
    read_for = readers or (None,) * len(addresses)
    regions = tuple(zip(addresses, block_bytes, read_for, strict=True))
    for layer, (start, size) in pages.items():
        if not any(
            low <= start and start + size <= low + length and (of is None or layer in of)
            for low, length, of in regions
        ):
            return layer
    return None


def overlay_unlike(pages: Iterable[tuple[int, int]]) -> bool:
    """True if pages of unlike bytes have some bytes of a block in common.

    Args:
        pages: where each layer's first page begins, and its bytes.
    """
    places = sorted(set(pages))
    return any(start + size > after for (start, size), (after, _) in pairwise(places))


#: The names that configurations have for KV heads, of some layers or of all.
_KV_HEADS = re.compile("key_value_heads|kv_heads|kv_n_heads|n_head_kv|num_attention_groups")
#: Parts of a model, and heads, that have no blocks in this cache.
_OF_OTHERS = re.compile("vision|image|audio|encoder|cross|indexer")


def totals_of(own: int, ranks: int, named: AbstractSet[int]) -> set[int]:
    """Returns the possible KV heads on all ranks of a layer that has `own` on each of them.

    Args:
        named: the numbers of KV heads that the model's configuration names.
    """
    if own > 1:
        return {own * ranks}
    shared = {total for total in range(1, ranks + 1) if ranks % total == 0}
    return (shared & named) or shared


def total_of(own: int, ranks: int, models: int, named: AbstractSet[int]) -> int:
    """Returns one of them, the same for all who number heads by it: the model's if it can be."""
    totals = totals_of(own, ranks, {models, *named})
    return models if models in totals else max(totals)


def number_heads(worker: Any, layers: Mapping[str, LayerCache]) -> dict[str, LayerCache]:
    """Numbers a rank's KV heads by layer, which may have other heads than the model states.

    Layers with windows do in MiMo-V2, and those with full attention in Gemma 4. Beside latents
    the only layers with heads are a draft model's, of which each rank may have all.
    """
    if not all(layer.has_heads for layer in layers.values()):
        return dict(layers)
    models, ranks = int(worker.model_config.get_total_num_kv_heads()), int(worker.world_size)
    named = named_heads_of(worker.vllm_config)

    def numbered(plane: Plane) -> Plane:
        if plane.is_whole or plane.content not in (Content.KEY, Content.VALUE):
            return plane
        total = total_of(plane.counts.heads, ranks, models, named)
        return replace(plane, first_head=int(worker.tp_rank) * total // ranks)

    return {
        name: replace(layer, planes=tuple(numbered(plane) for plane in layer.planes))
        for name, layer in layers.items()
    }


def named_heads_of(vllm_config: Any) -> frozenset[int]:
    """Returns the numbers of KV heads that a model's configuration names, and its draft model's."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    models = vllm_config.model_config, draft
    texts: list[Any] = [getattr(model, "hf_text_config", None) for model in models]
    named = (text.to_dict() for text in texts if hasattr(text, "to_dict"))
    return frozenset(number for one in named for number in _kv_heads(one, ""))


def _kv_heads(found: object, name: str) -> Iterator[int]:
    if _OF_OTHERS.search(name):
        return
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _kv_heads(value, str(key))
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _kv_heads(value, name)
    elif isinstance(found, int) and _KV_HEADS.search(name):
        yield found


def units_of(layers: Mapping[str, LayerCache]) -> tuple[tuple[str, ...], ...] | None:
    """The layers of each tensor; None where keys and values are not in one row."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if "kv" in layer.order.dimensions:
            return None
        found[layer.planes[0].address].append(name)
    return tuple(tuple(names) for names in found.values())


def cross_layer_groups_of(
    release: ReleaseWorker, layers: Mapping[str, LayerCache], layout: str
) -> tuple[tuple[str, ...], ...] | None:
    """Returns each group's layers as the release's plan has them follow one another in a block.

    None where that is not known. The plan is made of the model and the same on both sides,
    whatever the layout, where all pages have one size: a tensor of it places its layers one
    after the other behind those of the one before, and groups overlay one another. Where our
    own layers lie in cross-layer blocks, they must lie in that order.
    """
    found = packed_groups(release.worker, release.facts)
    if found is None:
        return None
    with_layers = tuple(group for group in found if not layers.keys().isdisjoint(group))
    if sorted(name for group in with_layers for name in group) != sorted(layers):
        return None
    for group in with_layers:
        starts = [layers[name].planes[0].address for name in group]
        if layout in LAYERS_INSIDE_BLOCKS and starts != sorted(starts):
            return None
    return with_layers


def own_regions(worker: Any, facts: ReleaseFacts) -> dict[str, Any]:
    """Returns what this worker states of its own regions, copied; nothing in releases <= 0.29."""
    return {
        name.removeprefix("_"): copy.copy(getattr(worker, name)) for name in facts.books_of_regions
    }


def layout_shown_by(layers: Mapping[str, LayerCache]) -> InnerLayout | None:
    """Returns HND or NHD, by the strides: in NHD the heads of a token are neighbours.

    None with one head, or blocks of one token: the two are the same bytes then.
    """
    for layer in layers.values():
        plane = layer.planes[0]
        if plane.counts.heads > 1 and plane.counts.block_tokens > 1:
            strides = plane.strides_bytes
            return "NHD" if strides.token > strides.head else "HND"
    return None


def state_layout_of_strides(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> None:
    """Makes the worker state the layout of its tensors, where it assumes another.

    An allocator may hand out NHD where the release planned HND. A peer with other blocks would then
    read heads for tokens. A backend with only one layout states the right one, and the release
    compares the names.
    """
    if any(layer.has_heads_by_turns for layer in layers.values()):
        return
    stated, shown = release.stated_layout, layout_shown_by(layers)
    if stated is None or shown is None:
        return
    found = layer_by_layer(shown, like=stated)
    if stated in LAYER_BY_LAYER and stated != found:
        _LOG.info("tensors said to be %s are %s, and peers are told so", stated, found)
        release.worker.kv_cache_layout = found


# --- HND or NHD, as a release lays out caches for its own backends -------------------------
#
# Backends without an order of their own (Triton <= 0.17, FlexAttention, ROCm's) have NHD on every
# engine, while the connector asks for HND and states it (0.10.1 to 0.28).


#: On releases <= 0.11.0 workers keep a backend's name alone, and layers need not say more: those
#: that lay out what is stated, and those without an order of their own.
_AS_STATED = ("FLASH_ATTN_VLLM_V1", "FLASHINFER_VLLM_V1", "FLASH_ATTN", "FLASHINFER")
_WITHOUT_ORDER = ("TRITON_ATTN_VLLM_V1", "TREE_ATTN_VLLM_V1", "XFORMERS_VLLM_V1", "FLEX_ATTENTION")


def layout_of_backends(release: ReleaseWorker, layers: Iterable[str]) -> InnerLayout | None:
    """Returns HND or NHD as this worker's backends have it, or else as it is stated."""
    known = backend_layouts(release, layers)
    return next(iter(known)) if len(known) == 1 else inner_layout(release.stated_layout)


def backend_layouts(release: ReleaseWorker, layers: Iterable[str]) -> frozenset[InnerLayout]:
    """The orders of heads and tokens that this worker's backends have; empty if unknown."""
    from vllm.config import set_current_vllm_config

    stated, config = release.stated_layout, release.worker.vllm_config
    backends: Sequence[Any] = release.attention_backends
    with set_current_vllm_config(config):
        if not release.facts.states_layout:
            from vllm.v1.attention.backends.utils import get_kv_cache_layout

            stated = get_kv_cache_layout()
        inner = inner_layout(stated)
        if inner is None or stated not in LAYER_BY_LAYER:
            return frozenset()
        if stated in NAMED_LAYOUTS:
            return frozenset({inner})
        if release.facts.shape_source == "flags":
            backends = [backend_of_layer(config, layer) for layer in layers]
        if None in backends or not backends:
            return _layouts_by_name(release.worker.backend_name, inner)
        of_vllm = [b for b in backends if b.__module__.partition(".")[0] == "vllm"]
        orders = [_order_of(release, backend) for backend in of_vllm]
    return frozenset() if None in orders else frozenset(filter(None, orders))


def _layouts_by_name(backend: str, stated: InnerLayout) -> frozenset[InnerLayout]:
    if backend in _AS_STATED:
        return frozenset({stated})
    return frozenset({"NHD"}) if backend in _WITHOUT_ORDER else frozenset()


def _order_of(release: ReleaseWorker, backend: Any) -> InnerLayout | None:
    """Returns the order in which the release's runner allocates for a backend; None if unknown."""
    try:
        names = release.order_of_backend(backend).dimensions
    except UnreadableGeometry:
        return None
    if not {"token", "head"} <= set(names):
        return None
    with suppress(AttributeError, NotImplementedError):
        names = tuple(names[axis] for axis in backend.get_kv_cache_stride_order())
    return inner_layout_of_axes(names)


def state_own_order(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> str | None:
    """Makes a worker state the order of its tensors' dimensions, where an allocator chose another.

    Returns:
        The layout that it would have stated, if that is another. A peer may still state it: one
        with the same allocator and without kvpatch, or one that really has that layout.
    """
    known, shown = backend_layouts(release, layers), layout_shown_by(layers)
    if not known or shown is None or shown in known:
        return None
    stated = release.stated_layout
    state_layout_of_strides(release, layers)
    return None if release.stated_layout == stated else stated
