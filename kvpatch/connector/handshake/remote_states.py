"""Where a peer has the recurrent states of our layers."""

from __future__ import annotations

from kvpatch.connector.handshake.agent_metadata import AgentMetadata
from kvpatch.connector.handshake.regions_by_layout import names_by_attention
from kvpatch.connector.local.local_geometry import LocalGeometry
from kvpatch.connector.local.recurrent_state import StatePages
from kvpatch.core.errors import PeerRefused
from kvpatch.geometry.layout_strides import LAYER_BY_LAYER


def states_of_peer(ours: LocalGeometry, peer: AgentMetadata) -> dict[str, StatePages]:
    """The pages of each layer's states on one rank of a peer whose regions are known to be ours.

    Raises:
        PeerRefused: its ranks are others, so that each has another share of a state, or its
            states are not ours.
    """
    if not ours.states:
        return {}
    if (peer.tp_rank, peer.tp_size) != (ours.tp_rank, ours.tp_size):
        raise PeerRefused(
            "recurrent state is split over ranks, and moves between as many of them",
            "use one --tensor-parallel-size on both sides",
        )
    _check_sizes(ours, peer)
    if peer.form is None and peer.layout not in LAYER_BY_LAYER:
        raise PeerRefused(
            f"recurrent state is not read from layout {peer.layout}",
            "use VLLM_KV_CACHE_LAYOUT=LBHNC on P",
        )
    parts = peer.kernel_blocks_per_block or 1
    found = {}
    for name, own in ours.states.items():
        if peer.form is None:
            region = _region_of(ours, peer, own)
            address, page_bytes = peer.addresses[region], peer.block_bytes[region] * parts
            stride_bytes = peer.stride_bytes[region] * parts
        else:
            places = _places(ours)
            page_bytes = peer.block_bytes[0] // len(places) * parts
            address = peer.addresses[0] + places[own.address] * page_bytes
            stride_bytes = peer.stride_bytes[0] * parts
        if own.size_bytes > page_bytes:
            raise PeerRefused(
                f"the states of layer {name} take {own.size_bytes} bytes, and a block of its has "
                f"{page_bytes}",
                "use one model on both sides",
            )
        found[name] = StatePages(address, stride_bytes, peer.blocks // parts, own.sizes_bytes)
    return found


def _region_of(ours: LocalGeometry, peer: AgentMetadata, own: StatePages) -> int:
    """The peer's region of the layers that begin where a state of ours does.

    By their names, where it states them: it may have registered them in another order.
    """
    names = names_by_attention(ours, peer)
    for region, name in enumerate(names or ()):
        if name in ours.layers and ours.layers[name].planes[0].address == own.address:
            return region
    if names is not None:
        raise PeerRefused(f"its regions are named {', '.join(names)}", "use one model")
    return ours.addresses.index(own.address)


def _check_sizes(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Whether its states are ours: by shapes and types in cross-layer blocks, else by bytes."""
    same_dtypes = "use one model, --dtype, --mamba-cache-dtype and --mamba-ssm-cache-dtype"
    sizes = {own.sizes_bytes for own in ours.states.values()}
    if peer.form is not None and peer.form.places != ours.cross_layer_places:
        raise PeerRefused(
            "its recurrent states have other shapes or types than ours, or lie beside other layers",
            f"{same_dtypes}, one vLLM and one --speculative-config",
        )
    if peer.form is None and sizes != {peer.state_bytes}:
        raise PeerRefused(
            f"its recurrent states take {peer.state_bytes} bytes and ours "
            f"{', '.join(map(str, sorted(sizes)))}",
            same_dtypes,
        )


def _places(ours: LocalGeometry) -> dict[int, int]:
    """The number of each place in a block, by the address of our layers that have it."""
    firsts = (ours.layers[first] for first, *_ in ours.places)
    return {layer.planes[0].address: place for place, layer in enumerate(firsts)}


def places_of_states(ours: LocalGeometry) -> dict[str, int]:
    """The place that each layer's states would have in a block; -1 beside no attention layer."""
    places = _places(ours)
    return {name: places.get(own.address, -1) for name, own in ours.states.items()}
