"""The ranks of a peer: what their regions and recurrent states have of ours.

A heterogeneous peer's are kept as its ranks shake hands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvpatch.core.errors import PeerRefused, UnplannableCopy
from kvpatch.core.releases import FACTS
from kvpatch.geometry.layout_strides import tells_states
from kvpatch.geometry.plane import HeadName, Plane, names_of_heads, planes_without
from kvpatch.geometry.state_shares import Rank, StateRun, shared_runs
from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import ONE_SIZE
from kvpatch.peer.remote_geometry import names_by_attention
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.recurrent_state import StateDivision, StatePages

if TYPE_CHECKING:
    from kvpatch.geometry.overlap import Overlap, Region

_SAME_DTYPES = "use one model, --dtype, --mamba-cache-dtype and --mamba-ssm-cache-dtype"


@dataclass(frozen=True)
class RemoteStates:
    """The states of one layer on one rank of a peer.

    Attributes:
        runs: what of a page is ours, and where in ours it lies.
    """

    pages: StatePages
    runs: tuple[StateRun, ...]


def states_of_peer(ours: LocalGeometry, peer: AgentMetadata) -> dict[str, RemoteStates]:
    """Returns each layer's states on one rank of a peer whose regions are known to be ours.

    Refuses other states: by shapes and types in cross-layer blocks, else by bytes.
    """
    if not ours.states:
        return {}
    check_ranks_of_states(ours, peer)
    parts, places = peer.kernel_blocks_per_block or 1, _places(ours)
    ranks = Rank(peer.tp_rank, peer.tp_size), Rank(ours.tp_rank, ours.tp_size)
    sizes_of = {name: _sizes_on(ranks[0], ours, own) for name, own in ours.states.items()}
    if peer.form is None and {*sizes_of.values()} != {peer.state_bytes}:
        raise _other_sizes(peer.state_bytes, {*sizes_of.values()})
    names_regions = peer.region_names is not None
    is_told = tells_states(peer.layout, names_regions=names_regions, has_heads=ours.has_heads)
    if peer.form is None and not is_told:
        raise PeerRefused(
            f"recurrent state is not read from layout {peer.layout}",
            "use VLLM_KV_CACHE_LAYOUT=LBHNC on P",
        )
    if peer.form is not None and peer.form.places != ours.cross_layer_places:
        raise PeerRefused(
            "its recurrent states have other shapes or types than ours, or lie beside other layers",
            f"{_SAME_DTYPES}, one vLLM and one --speculative-config",
        )
    found = {}
    for name, own in ours.states.items():
        region = 0 if peer.form is not None else _region_of(ours, peer, own)
        address, page_bytes = peer.addresses[region], peer.block_bytes[region] * parts
        if peer.form is not None:
            page_bytes = peer.block_bytes[0] // len(places) * parts
            address += places[own.address] * page_bytes
        sizes = sizes_of[name]
        if sum(sizes) > page_bytes:
            raise PeerRefused(
                f"the states of layer {name} take {sum(sizes)} bytes, and a block of its has "
                f"{page_bytes}",
                "use one model on both sides",
            )
        stride_bytes = peer.stride_bytes[region] * parts
        runs: tuple[StateRun, ...] = (StateRun(0, 0, own.size_bytes),)
        if ranks[0] != ranks[1]:
            runs = shared_runs(own.division.states, *ranks)
        pages = StatePages(address, stride_bytes, peer.blocks // parts, sizes)
        found[name] = RemoteStates(pages, runs)
    return found


def is_misread(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if the release reads a peer's states wrongly, or ends by them.

    Where both sides have other numbers of ranks it takes all parts of a state for shared out. One
    that every rank has whole is misread, and one that nobody here can divide counts as such.
    """
    divisions = [own.division for own in ours.states.values()]
    has_copies = any(division.has_copies or division.reason for division in divisions)
    if peer.tp_size > ours.tp_size and _reads_one_rank(ours):
        return True
    return has_copies and peer.tp_size != ours.tp_size


def _reads_one_rank(ours: LocalGeometry) -> bool:
    """True if the release reads the states of one rank alone, of however many P has.

    <= 0.26 it takes a model of latents for one that has nothing else: from 0.21 on D ends by it.
    """
    return bool(ours.states) and not (ours.has_heads or ours.facts.reads_states_by_latents)


def _sizes_on(rank: Rank, ours: LocalGeometry, own: StatePages) -> tuple[int, ...]:
    """Returns what our states of a layer take on a rank of a peer."""
    if rank == (ours.tp_rank, ours.tp_size):
        return own.sizes_bytes
    try:
        return own.division.sizes_bytes(rank)
    except UnplannableCopy as error:
        raise PeerRefused(f"its recurrent states: {error}", ONE_SIZE) from error


def _region_of(ours: LocalGeometry, peer: AgentMetadata, own: StatePages) -> int:
    """Returns the peer's region of the layers that begin where a state of ours does.

    It goes by their names where the peer states them: it may have registered them in another order.
    """
    names = names_by_attention(ours, peer)
    for region, name in enumerate(names or ()):
        if name in ours.layers and ours.layers[name].planes[0].address == own.address:
            return region
    if names is not None:
        raise PeerRefused(f"its regions are named {', '.join(names)}", "use one model")
    return ours.addresses.index(own.address)


def check_state_sizes(peer: AgentMetadata, sizes: Set[tuple[int, ...]]) -> None:
    """Refuses a peer for the release to read whose states are not as large as ours would be there.

    No hash of a release's tells their types, and none compares their sizes (<= 0.33).

    Args:
        sizes: of each state, of a layer of any kind that we have; none where they are not known.
    """
    if sizes and any(peer.state_bytes) and peer.state_bytes not in sizes:
        raise _other_sizes(peer.state_bytes, sizes)


def _other_sizes(theirs: tuple[int, ...], sizes: Set[tuple[int, ...]]) -> PeerRefused:
    ours = ", ".join(map(str, sorted(sizes)))
    return PeerRefused(f"its recurrent states take {theirs} bytes and ours {ours}", _SAME_DTYPES)


def sizes_at_peer(ours: LocalGeometry, peer: AgentMetadata) -> set[tuple[int, ...]]:
    """Returns what our states would take on a rank of a peer that the release reads."""
    if not ours.states:
        return set()
    if peer.tp_size == ours.tp_size:
        return {ours.state_bytes} if ours.state_bytes else set()
    rank = Rank(peer.tp_rank, peer.tp_size)
    return {_sizes_on(rank, ours, own) for own in ours.states.values()}


def check_ranks_of_states(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a peer of other ranks whose states are no known shares of what ours are."""
    if not ours.states or (peer.tp_rank, peer.tp_size) == (ours.tp_rank, ours.tp_size):
        return
    if peer.form is not None:
        raise PeerRefused(
            "recurrent state in kvcached's contiguous layout moves between as many ranks", ONE_SIZE
        )
    if not all(FACTS[release].has_channels_first for release in peer.releases):
        raise PeerRefused(
            "recurrent state is split over ranks, and its release may have a convolution's "
            "channels innermost",
            f"{ONE_SIZE}, or vLLM 0.20 or later on P",
        )
    if peer.tp_size > ours.tp_size and _reads_one_rank(ours):
        raise PeerRefused(
            "recurrent state is split over ranks, and this vLLM reads one of P's alone, as each "
            "has all latents",
            f"{ONE_SIZE}, or vLLM 0.27 or later on D",
        )
    for name, own in ours.states.items():
        if own.division.reason:
            raise undivided(name, own.division)


def undivided(layer: str, division: StateDivision) -> PeerRefused:
    """Returns the refusal of a peer of other ranks for a layer whose states nobody can divide."""
    return PeerRefused(
        f"recurrent state is split over ranks, and that of layer {layer} moves between as many of "
        f"them: {division.reason}",
        ONE_SIZE,
    )


def _places(ours: LocalGeometry) -> dict[int, int]:
    """The number of each place in a block, by the address of our layers that have it."""
    firsts = (ours.layers[first] for first, *_ in ours.places)
    return {layer.planes[0].address: place for place, layer in enumerate(firsts)}


def places_of_states(ours: LocalGeometry) -> dict[str, int]:
    """The place that each layer's states would have in a block; -1 beside no attention layer."""
    places = _places(ours)
    return {name: places.get(own.address, -1) for name, own in ours.states.items()}


# --- a heterogeneous peer's ---------------------------------------------------------------


class Rest(NamedTuple):
    """The part of a rank that is read, once other ranks of its peer are read too.

    Attributes:
        overlaps: the copies of local heads that none of the other ranks has.
        taken: the local heads that the other ranks have.
        is_nothing: True if the other ranks have all local heads that this rank has.
    """

    overlaps: tuple[Overlap, ...]
    taken: frozenset[HeadName] = frozenset()
    is_nothing: bool = False


@dataclass(eq=False)
class RemoteRank:
    """A rank of a peer: what it stated, where its layers overlap ours, its name to NIXL."""

    metadata: AgentMetadata
    regions: tuple[Region, ...]
    overlaps: tuple[Overlap, ...]
    agent: str = ""
    states: Mapping[str, RemoteStates] = field(default_factory=dict)
    _rests: dict[tuple[RemoteRank, ...], Rest] = field(default_factory=dict, init=False)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(plane for region in self.regions for plane in region)

    @cached_property
    def block_tokens(self) -> Mapping[str, int]:
        """Returns the tokens of its kernel blocks, by layer."""
        return {plane.layer: plane.counts.block_tokens for plane in self.planes}

    @cached_property
    def heads(self) -> frozenset[HeadName]:
        """Every head of every content of every layer that it holds."""
        return names_of_heads(self.planes)

    def behind(self, others: tuple[RemoteRank, ...], local: Sequence[Plane]) -> Rest:
        """Returns the part of this rank that is read once `others` are read: heads they lack.

        Each head is read from one rank. Copies on several ranks may differ in their bytes: matrices
        of other shapes are multiplied in other orders, at least on a CPU.
        """
        if not others:
            return Rest(self.overlaps)
        from kvpatch.geometry.overlap import overlaps_of  # a like peer needs none of it

        found = self._rests.get(others)  # each request has the same ones
        if found is None:
            held = others[0].heads.union(*(one.heads for one in others[1:]))
            taken = held & names_of_heads(local)
            found = Rest(self.overlaps, taken)
            if taken & self.heads:
                overlaps = overlaps_of(self.regions, planes_without(local, taken))
                found = Rest(overlaps, taken, is_nothing=not overlaps)
            self._rests[others] = found
        return found


@dataclass
class Peer:
    """A heterogeneous peer, as far as its ranks have shaken hands.

    Attributes:
        missing: a head of ours that none of the ranks holds, in words.
    """

    ranks: dict[int, RemoteRank] = field(default_factory=dict)
    missing: str | None = None

    def add(self, rank: RemoteRank, local: Sequence[Plane]) -> None:
        """Books a rank, and what is still missing of our planes."""
        self.ranks[rank.metadata.tp_rank] = rank
        held = frozenset[HeadName]().union(*(rank.heads for rank in self.ranks.values()))
        missing = (
            f"{plane.content.value} head {head} of layer {plane.layer}"
            for plane in local
            for head in range(plane.first_head, plane.end_head)
            if (plane.layer, plane.content, head) not in held
        )
        self.missing = next(missing, None)
