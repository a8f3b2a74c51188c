"""The caches that a planned engine would register and state at a handshake.

Addresses are made up; all else follows from the description or the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace

from kvpatch.core.errors import CannotPlan, UnplannableCopy
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS
from kvpatch.geometry.memory import Memory
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.geometry.state_shares import Rank
from kvpatch.geometry.tensor_facts import TensorFacts
from kvpatch.peer.agent_metadata import AgentMetadata, read_agent_metadata
from kvpatch.peer.block_shapes import heads_of
from kvpatch.peer.split_kv import kv_split_of
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.model import DESCRIBE
from kvpatch.worker.cache_kinds import LATENT, ROWS
from kvpatch.worker.local_geometry import LocalGeometry, layout_shown_by, units_of
from kvpatch.worker.recurrent_state import StatePages
from kvpatch.worker.registered_caches import LayerCache

#: More than prompts fill, and divisible by what blocks are cut into.
_BLOCKS = 2520 * 256
_FIRST_ADDRESS = 1 << 56
_APART = 1 << 48


@dataclass(frozen=True)
class RankCache:
    """The caches that one rank of an engine would register."""

    engine: PlannedEngine
    rank: int
    geometry: LocalGeometry

    def stated(self, facts: ReleaseFacts) -> AgentMetadata:
        """Returns the statement of a handshake, as a peer of a release reads it."""
        ours, engine = self.geometry, self.engine
        regions = len(ours.addresses)
        states = next(iter(ours.states.values()), None)
        stated = SimpleNamespace(
            engine_id=engine.role,
            agent_metadata=b"",
            kv_caches_base_addr=list(ours.addresses),
            device_id=ours.memory.device_id,
            num_blocks=_BLOCKS * engine.parts,
            block_len=ours.block_bytes[0],
            block_lens=list(ours.block_bytes),
            block_strides=list(ours.block_bytes),
            kv_cache_layout=engine.layout,
            block_size=engine.kernel_tokens,
            attn_backend_name=engine.backend.name,
            physical_blocks_per_logical_kv_block=engine.parts,
            ssm_sizes=states.sizes_bytes if states else (),
            region_num_blocks=None,
            region_names=list(ours.region_names or ()) or None,
            region_mem_types=[ours.memory.kind] * regions,
            packed_member_layouts={},
        )
        return read_agent_metadata(stated, facts, self.rank, engine.tp_size)


def rank_cache(engine: PlannedEngine, rank: int) -> RankCache:
    """Returns the caches that a rank of an engine would register.

    Raises:
        CannotPlan: it is of a kind that is not planned for.
    """
    return RankCache(engine, rank, _Making(engine, rank).geometry())


@dataclass(frozen=True)
class _Making:
    engine: PlannedEngine
    rank: int

    def geometry(self) -> LocalGeometry:
        engine, facts = self.engine, self.engine.facts
        groups = self._groups()
        places = {number: place for group in groups for place, number in enumerate(group)}
        layers = {_name(n): self._layer(_name(n), places[n]) for n in engine.caches.attention}
        regions = self._regions(layers)
        shown = layout_shown_by(layers) or "HND"
        layout = engine.layout if facts.states_layout else shown
        named = tuple(tuple(map(_name, group)) for group in groups)
        with_layers = tuple(tuple(n for n in group if n in layers) for group in named)
        asks_cut = facts.states_block_size and not facts.states_kernel_blocks
        states = self._states(places, layers)
        found = LocalGeometry(
            layers=layers,
            addresses=tuple(regions),
            block_bytes=tuple(size for _, size in regions.values()),
            block_tokens=engine.kernel_tokens,
            kernel_blocks_per_block=engine.parts,
            layout=layout,
            inner_layout=shown,
            total_heads=1 if engine.caches.is_mla else engine.caches.kv_heads,
            tp_rank=self.rank,
            tp_size=engine.tp_size,
            memory=self._memory(),
            backend=engine.backend.name,
            backends=frozenset({engine.backend.name}),
            key_order=engine.key_order,
            tiles_on_amx=engine.caches.cache_dtype == engine.caches.model_dtype == "bfloat16",
            facts=facts,
            region_names=tuple(n for n, _ in regions.values()) if facts.names_regions else None,
            units=units_of(layers) if layout in NAMED_LAYOUTS else None,
            cross_layer_groups=tuple(filter(None, with_layers)) if facts.plans_transfers else None,
            kernel_sizes=engine.backend.kernel_sizes(facts) if asks_cut else None,
            groups=tuple(map(frozenset, named)) if len(named) > 1 else None,
            misreads_blocks=facts.topology_has_block_size and engine.backend.device == "cpu",
            backend_layout=engine.inner_layout,
            states=states,
            state_bytes=next((own.sizes_bytes for own in states.values()), ()),
        )
        holds_both = engine.backend.order(facts).dimensions[:2] == ("block", "kv")
        if holds_both and found.key_order is KeyOrder.ROW_MAJOR:
            return replace(found, kv_split=kv_split_of(found))
        return found

    def _memory(self) -> Memory:
        on_device = self.engine.buffer_device != "cpu"
        return Memory("VRAM" if on_device else "DRAM", self.rank if on_device else 0)

    # --- which layers share memory ----------------------------------------------------

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the layers of each block table."""
        caches = self.engine.caches
        return caches.numbered_groups if self.engine.has_groups else (tuple(caches.attention),)

    def _address(self, place: int) -> int:
        side = 0 if self.engine.role == "P" else 1
        return _FIRST_ADDRESS * (1 + side) + _APART * place

    # --- one layer --------------------------------------------------------------------

    def _layer(self, name: str, place: int) -> LayerCache:
        engine = self.engine
        order = engine.backend.order(engine.facts)
        sizes = self._sizes()
        shape = tuple(sizes[dimension] for dimension in order.dimensions)
        strides = self._strides(order.dimensions, sizes)
        address = self._address(place)
        tensor = TensorFacts(
            address,
            shape,
            tuple(strides[dimension] for dimension in order.dimensions),
            engine.item_bytes,
            self._memory(),
            address,
            prod(shape) * engine.item_bytes,
        )
        first_head, _ = heads_of(engine.caches.kv_heads, self.rank, engine.tp_size)
        planes = read_planes(
            name, tensor, order, engine.key_order, 0 if engine.caches.is_mla else first_head
        )
        return LayerCache(order, planes, LATENT if engine.caches.is_mla else ROWS)

    def _sizes(self) -> Mapping[str, int]:
        engine = self.engine
        return {
            "kv": 2,
            "block": _BLOCKS * engine.parts,
            "token": engine.kernel_tokens,
            "head": engine.heads,
            "channel": engine.caches.first.head_dim,
            "packed": 2 * engine.caches.first.head_dim,
        }

    def _strides(self, dimensions: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
        """In elements, without gaps, heads and tokens in the order of the layout."""
        order = list(dimensions)
        if {"head", "token"} <= set(order):
            places = sorted(order.index(axis) for axis in ("head", "token"))
            inner = self.engine.inner_layout
            order[places[0]], order[places[1]] = (
                ("head", "token") if inner == "HND" else ("token", "head")
            )
        strides, step = {}, 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= sizes[dimension]
        return strides

    def _regions(self, layers: Mapping[str, LayerCache]) -> dict[int, tuple[str, int]]:
        """(layer, bytes of a kernel block) of each region, by its address."""
        found: dict[int, tuple[str, int]] = {}
        for name, layer in layers.items():
            rows = [prod(plane.counts[1:]) * plane.item_bytes for plane in layer.planes]
            if layer.order.dimensions[0] == "kv":
                for plane, size in zip(layer.planes, rows, strict=True):
                    found.setdefault(plane.address, (name, size))
            else:
                found.setdefault(layer.planes[0].address, (name, sum(rows)))
        return found

    # --- recurrent state ----------------------------------------------------------------

    def _states(
        self, places: Mapping[int, int], layers: Mapping[str, LayerCache]
    ) -> dict[str, StatePages]:
        engine, division = self.engine, self.engine.division
        if division is None:
            return {}
        if engine.facts.cache_shape != "packed":
            raise CannotPlan("not planned for: recurrent states before vLLM 0.26", DESCRIBE)
        first = next(iter(layers.values()))
        page_bytes = sum(prod(plane.counts[1:]) * plane.item_bytes for plane in first.planes)
        page_bytes *= engine.parts
        try:
            sizes = division.sizes_bytes(Rank(self.rank, engine.tp_size))
        except UnplannableCopy as error:  # which ends an engine when it starts
            raise CannotPlan(
                f"{engine.role}: not planned for: recurrent states: {error}",
                "use a --tensor-parallel-size that divides them",
            ) from error
        return {
            _name(n): StatePages(self._address(places[n]), page_bytes, _BLOCKS, sizes, division)
            for n in engine.caches.states
        }


def _name(number: int) -> str:
    return f"layer.{number}"
