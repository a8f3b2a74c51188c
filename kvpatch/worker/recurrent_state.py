"""Recurrent state (Mamba) of a hybrid model: in which pages it lies, here and at a peer.

Its blocks are blocks of attention's, of another group: the i-th layer of every group has one
place in the memory (a tensor, or a part of a cross-layer block), in which a block of a layer's
states is a page as large as attention's block. The states lie one behind the other from the
page's beginning, and need not fill it. A block that is cut into kernel blocks is several of
attention's, and one page of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.cross_layer_blocks import CrossLayerBlocks
from kvpatch.geometry.plane import extent_bytes
from kvpatch.geometry.state_shares import Part, Rank, SharedState
from kvpatch.worker.release_worker import ReleaseWorker

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StateDivision:
    """The states of a layer, of all ranks together.

    Attributes:
        states: one behind the other; none where ranks other than ours cannot be read.
        reason: why they cannot.
    """

    states: tuple[SharedState, ...] = ()
    reason: str = "nobody has said how ranks share them out"

    def sizes_bytes(self, rank: Rank) -> tuple[int, ...]:
        """Returns the bytes of each state on a rank; raises UnplannableCopy for unequal shares."""
        return tuple(state.size_bytes(rank) for state in self.states)

    @property
    def has_copies(self) -> bool:
        """True if every rank has some part of a state whole."""
        return any(part.is_copied for state in self.states for part in state.parts)


@dataclass(frozen=True)
class StatePages:
    """The place of one layer's states on one rank.

    Attributes:
        address: of the first block's page.
        stride_bytes: from one block's page to the next.
        blocks: how many there are, as ids count them.
        sizes_bytes: of each state in a page, from its beginning on.
    """

    address: int
    stride_bytes: int
    blocks: int
    sizes_bytes: tuple[int, ...]
    division: StateDivision = StateDivision()

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)


@dataclass(frozen=True)
class StateInPool:
    """The recurrent state of one layer in a pool of cross-layer blocks.

    Attributes:
        place: among the parts of a block.
        tensors: as they were handed to the registration.
        offsets: of each tensor, in bytes from the place's beginning.
    """

    place: int
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]


def states_in(
    kv_caches: Mapping[str, Any], attention: Mapping[str, Any], pool: CrossLayerBlocks, parts: int
) -> dict[str, StateInPool]:
    """Returns the layers that are no attention, as states in the cross-layer blocks of the others.

    Args:
        parts: cross-layer blocks to one of the blocks that ids count.
    """
    page_bytes = pool.layer_bytes[0] * parts
    found = {}
    for name in kv_caches.keys() - attention.keys():
        cache = kv_caches[name]
        tensors = tensors_of(cache)
        start = min(tensor.data_ptr() for tensor in tensors) - pool.address
        place = start // page_bytes
        offsets = tuple(tensor.data_ptr() - pool.address - place * page_bytes for tensor in tensors)
        fits = (
            start % page_bytes == 0
            and place < len(pool.layers)
            and set(pool.layer_bytes) == {pool.layer_bytes[0]}
            and all(
                tensor.shape[0] * parts == pool.blocks
                and tensor.stride(0) * tensor.element_size() == pool.block_bytes * parts
                and offset + _reach(tensor) <= page_bytes
                for tensor, offset in zip(tensors, offsets, strict=True)
            )
        )
        if not fits:
            raise RegistrationRefused(
                f"{name} is no attention cache, and no state in a page of {page_bytes} bytes of "
                f"kvcached's contiguous layout: expected one of the {len(pool.layers)} places of "
                f"{pool.blocks // parts} rows of {pool.block_bytes * parts} bytes, found "
                f"{[(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors]} at byte "
                f"{start}",
                "set KVCACHED_CONTIGUOUS_LAYOUT=false",
            )
        found[name] = StateInPool(place, tensors, offsets)
    return dict(sorted(found.items()))


def tensors_of(cache: Any) -> tuple[Any, ...]:
    """Returns a layer's tensors: one, or (<= 0.26) one for each of its states."""
    return tuple(cache) if isinstance(cache, list | tuple) else (cache,)


def _reach(tensor: torch.Tensor) -> int:
    """Returns the bytes of one block, from its first element to past its last."""
    axes = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    # In elements, of which one has one.
    return int(extent_bytes(axes, 1) * tensor.element_size())


def sizes_of_states(spec: Any) -> tuple[int, ...]:
    """Returns the bytes of each state of a layer in a block, by its spec."""
    states = zip(spec.shapes, spec.dtypes, strict=True)
    return tuple(prod(shape) * dtype.itemsize for shape, dtype in states)


def pages_of(cache: Any, spec: Any) -> StatePages | None:
    """The pages of a layer's states; None where they do not lie as every peer takes them to.

    Args:
        cache: what was handed to the registration: a tensor for each state (<= 0.26), or one
            of pages of bytes.
        spec: of the layer, in the release's plan.
    """
    tensors = tensors_of(cache)
    sizes = sizes_of_states(spec)
    first = tensors[0]
    stride_bytes = first.stride(0) * first.element_size()
    if len(tensors) == 1 and len(sizes) > 1:
        lies_right = _reach(first) >= sum(sizes)
    else:
        starts = [first.data_ptr() + sum(sizes[:number]) for number in range(len(sizes))]
        lies_right = [tensor.data_ptr() for tensor in tensors] == starts and all(
            _reach(tensor) == size
            and prod(tensor.shape[1:]) * tensor.element_size() == size
            and tensor.stride(0) * tensor.element_size() == stride_bytes
            and tensor.shape[0] == first.shape[0]
            for tensor, size in zip(tensors, sizes, strict=True)
        )
    if not lies_right or sum(sizes) > stride_bytes:
        return None
    return StatePages(first.data_ptr(), stride_bytes, int(first.shape[0]), sizes)


def states_digest(places: str, states: Mapping[str, int], specs: Mapping[str, Any]) -> str:
    """Returns a digest of who shares a place, and of every state's shape and type.

    Args:
        places: the digest of attention's places.
        states: the place of each layer that has states.
        specs: of these layers, in the release's plan: from 0.27 on a tensor is a page of bytes,
            of whatever states.
    """
    if not states:
        return places
    planned = {name: (specs[name].shapes, specs[name].dtypes) for name in states}
    told = [places, *(f"{name}={place}:{planned[name]}" for name, place in sorted(states.items()))]
    return sha256("\n".join(told).encode()).hexdigest()[:16]


# --- the division of a layer's states among ranks, by its spec ----------------------------------
#
# From 0.20 on a convolution's channels are outermost in its state, or a worker does not start
# (VLLM_SSM_CONV_STATE_LAYOUT=DS), so that each of the parts that follow one another in it is in one
# piece:
#
# - Mamba2: the channels of x, which are the heads', then those of B and C, which are the groups'. A
#   rank has the groups of its heads; where there is one group for all heads, every rank has it.
# - gated delta nets: the channels of queries and keys, which are the key heads', then of values.
# - Mamba1: channels alone, as in its state space.
#
# What no rule here is about is divided by nobody: an allow-list.

#: What configurations of models call the number of Mamba2's groups.
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def state_division(spec: Any, ranks: int, model: Any, facts: ReleaseFacts) -> StateDivision:
    """Returns how a layer's states are shared out.

    Args:
        spec: of the layer, in the plan of one of `ranks`.
        model: its configuration, of the text where there is more.
    """
    if not facts.has_channels_first:
        return StateDivision(reason="this release may have a convolution's channels innermost")
    if getattr(spec, "tp_replicated", False):
        return StateDivision(reason="some are whole on every rank")
    found = spec.mamba_type
    kind = str(getattr(found, "name", found)).upper()  # from 0.21 a member of an enumeration
    is_pair = len(spec.shapes) == 2 and len(spec.shapes[0]) == 2
    if not is_pair or kind not in ("MAMBA1", "MAMBA2", "GDN_ATTN"):
        return StateDivision(
            reason=f"{len(spec.shapes)} states of {kind} are none that kvpatch can divide"
        )
    groups = {getattr(model, name, None) for name in _GROUPS}
    numbers = [number for number in groups if isinstance(number, int)]
    divided = _parts(kind, spec.shapes, ranks, numbers[0] if len(numbers) == 1 else None)
    if isinstance(divided, str):
        return StateDivision(reason=divided)
    (_, positions), (_, *inner) = spec.shapes
    conv_bytes, item_bytes = (dtype.itemsize for dtype in spec.dtypes)
    convolution, units = divided
    return StateDivision(
        (
            SharedState(positions * conv_bytes, convolution),
            SharedState(prod(inner) * item_bytes, (Part(units * ranks),)),
        ),
        reason="",
    )


def division_of(release: ReleaseWorker, spec: Any) -> StateDivision:
    """Returns how ranks share out the states of a layer of a worker's, by its spec."""
    worker = release.worker
    model = getattr(worker.model_config, "hf_text_config", None)
    return state_division(spec, worker.world_size, model, release.facts)


def divided_states(release: ReleaseWorker) -> dict[str, StateDivision]:
    """Returns how the states of each layer are shared out, by the release's plan.

    Those that the release itself takes for whole on every rank are left out.
    """
    if not release.facts.has_cache_groups:
        return {}
    specs = {layer: release.spec_of(layer) for layer in release.worker._layer_specs}
    return {
        layer: division_of(release, spec)
        for layer, spec in specs.items()
        if hasattr(spec, "shapes") and not getattr(spec, "tp_replicated", False)
    }


def _parts(
    kind: str, shapes: tuple[tuple[int, ...], ...], ranks: int, groups: int | None
) -> tuple[tuple[Part, ...], int] | str:
    """The parts of the convolution, and units of a rank's other state; else what is wrong."""
    (channels, _), (units, *inner) = shapes
    if kind == "MAMBA1":
        if channels != units or len(inner) != 1:
            return f"shapes {shapes} are not Mamba1's"
        return (Part(channels * ranks),), units
    if len(inner) != 2:
        return f"shapes {shapes} are not {kind}'s"
    rest, odd = divmod(channels - units * inner[0], 2)
    if odd or rest < 1:
        return f"shapes {shapes} are not {kind}'s"
    of_heads = Part(units * inner[0] * ranks)
    if kind == "GDN_ATTN":  # no key head is on two ranks, so the width of one does not matter
        of_keys = Part(rest * ranks)
        return (of_keys, of_keys, of_heads), units
    own, left = divmod(rest, inner[1])
    if left:
        return f"shapes {shapes} are not {kind}'s"
    of_groups = _groups_part(own, inner[1], ranks, groups)
    return of_groups if isinstance(of_groups, str) else ((of_heads, of_groups, of_groups), units)


def _groups_part(own: int, width: int, ranks: int, groups: int | None) -> Part | str:
    """Returns the part of a Mamba2 convolution that is B, or C: of a rank's own groups, of all."""
    if ranks > 1 and own == 1:
        if groups not in (1, ranks):
            return f"{ranks} ranks have a group each, and the model says {groups} groups"
        return Part(groups * width, is_copied=groups == 1)
    return Part(own * ranks * width, is_copied=own * ranks == 1)
