"""The caches that a planned engine would register and state at a handshake.

Addresses are made up; all else follows from the description or the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import SimpleNamespace

from kvpatch.core.errors import BadOptions, UnplannableCopy
from kvpatch.geometry.layout_strides import NAMED_LAYOUTS
from kvpatch.geometry.plane import Memory, TensorFacts
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.geometry.state_shares import Rank
from kvpatch.peer.agent_metadata import AgentMetadata, read_agent_metadata
from kvpatch.peer.block_shapes import heads_of
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.worker.cache_kinds import LATENT, ROWS
from kvpatch.worker.local_geometry import LocalGeometry, units_of
from kvpatch.worker.recurrent_state import StatePages
from kvpatch.worker.registered_caches import LayerCache

#: More than prompts fill, and divisible by what blocks are cut into.
_BLOCKS = 2520 * 256
_FIRST_ADDRESS = 1 << 56
_APART = 1 << 48


def geometry_of(engine: PlannedEngine, rank: int) -> LocalGeometry:
    """Returns the caches that a rank of an engine would register."""
    facts, caches = engine.facts, engine.caches
    groups = caches.numbered_groups if caches.has_groups else (tuple(caches.attention),)
    places = {number: place for group in groups for place, number in enumerate(group)}
    layers = {_name(n): _layer(engine, rank, n, places[n]) for n in caches.attention}
    # Layers of several block tables lie in one tensor, which is registered once.
    regions: dict[int, tuple[str, int]] = {}
    for name, layer in layers.items():
        size = sum(prod(plane.counts[1:]) * plane.item_bytes for plane in layer.planes)
        regions.setdefault(layer.planes[0].address, (name, size))
    named = tuple(tuple(map(_name, group)) for group in groups)
    with_layers = tuple(tuple(n for n in group if n in layers) for group in named)
    page_bytes = next(iter(regions.values()))[1] * engine.parts
    states = _states(engine, rank, places, page_bytes)
    return LocalGeometry(
        layers=layers,
        addresses=tuple(regions),
        block_bytes=tuple(size for _, size in regions.values()),
        block_tokens=engine.kernel_tokens,
        kernel_blocks_per_block=engine.parts,
        layout=engine.layout,
        inner_layout=engine.inner_layout,
        total_heads=1 if caches.is_mla else caches.kv_heads,
        tp_rank=rank,
        tp_size=engine.tp_size,
        memory=_memory(engine, rank),
        backend=engine.backend.name,
        backends=frozenset({engine.backend.name}),
        key_order=engine.key_order,
        tiles_on_amx=caches.cache_dtype == caches.model_dtype == "bfloat16",
        facts=facts,
        region_names=tuple(n for n, _ in regions.values()) if facts.names_regions else None,
        units=units_of(layers) if engine.layout in NAMED_LAYOUTS else None,
        cross_layer_groups=tuple(filter(None, with_layers)) if facts.plans_transfers else None,
        groups=tuple(map(frozenset, named)) if len(named) > 1 else None,
        states=states,
        state_bytes=next((own.sizes_bytes for own in states.values()), ()),
    )


def stated_by(engine: PlannedEngine, rank: int, d: PlannedEngine) -> AgentMetadata:
    """Returns the statement of a rank at a handshake, as D reads it."""
    ours = geometry_of(engine, rank)
    stated = SimpleNamespace(
        engine_id=engine.role,
        agent_metadata=b"",
        kv_caches_base_addr=list(ours.addresses),
        device_id=ours.memory.device_id,
        num_blocks=_BLOCKS * engine.parts,
        block_lens=list(ours.block_bytes),
        block_strides=list(ours.block_bytes),
        kv_cache_layout=engine.layout,
        block_size=engine.kernel_tokens,
        attn_backend_name=engine.backend.name,
        physical_blocks_per_logical_kv_block=engine.parts,
        ssm_sizes=ours.state_bytes,
        region_num_blocks=None,
        region_names=list(ours.region_names or ()) or None,
        region_mem_types=[ours.memory.kind] * len(ours.addresses),
        packed_member_layouts={},
    )
    return read_agent_metadata(stated, d.facts, rank, engine.tp_size)


def _name(number: int) -> str:
    return f"layer.{number}"


def _address(engine: PlannedEngine, place: int) -> int:
    return _FIRST_ADDRESS * (1 if engine.role == "P" else 2) + _APART * place


def _memory(engine: PlannedEngine, rank: int) -> Memory:
    return Memory("DRAM", 0) if engine.device == "cpu" else Memory("VRAM", rank)


def _layer(engine: PlannedEngine, rank: int, number: int, place: int) -> LayerCache:
    """A layer's tensor without gaps, its heads and tokens in the order of the layout."""
    caches, order = engine.caches, engine.backend.order(engine.facts)
    sizes = {
        "block": _BLOCKS * engine.parts,
        "token": engine.kernel_tokens,
        "head": engine.heads,
        "channel": caches.first.head_dim,
        "packed": 2 * caches.first.head_dim,
    }
    other = {"head": "token", "token": "head"} if engine.inner_layout == "NHD" else {}
    other = other if "head" in order.dimensions else {}
    strides, step = {}, 1
    for dimension in reversed([other.get(one, one) for one in order.dimensions]):
        strides[dimension] = step
        step *= sizes[dimension]
    address = _address(engine, place)
    tensor = TensorFacts(
        address,
        tuple(sizes[dimension] for dimension in order.dimensions),
        tuple(strides[dimension] for dimension in order.dimensions),
        engine.item_bytes,
        _memory(engine, rank),
        address,
        step * engine.item_bytes,
    )
    first_head = 0 if caches.is_mla else heads_of(caches.kv_heads, rank, engine.tp_size)[0]
    planes = read_planes(_name(number), tensor, order, engine.key_order, first_head)
    return LayerCache(order, planes, LATENT if caches.is_mla else ROWS)


def _states(
    engine: PlannedEngine, rank: int, places: Mapping[int, int], page_bytes: int
) -> dict[str, StatePages]:
    found = {}
    for number, layer in engine.caches.states.items():
        try:
            sizes = layer.division.sizes_bytes(Rank(rank, engine.tp_size))
        except UnplannableCopy as error:  # which ends an engine when it starts
            raise BadOptions(
                f"{engine.role}: not planned for: recurrent states: {error}",
                "use a --tensor-parallel-size that divides them",
            ) from error
        address = _address(engine, places[number])
        found[_name(number)] = StatePages(address, page_bytes, _BLOCKS, sizes, layer.division)
    return found
