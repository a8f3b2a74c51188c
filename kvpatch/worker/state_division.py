"""The division of a layer's recurrent states among ranks, by its spec.

From 0.20 on a convolution's channels are outermost in its state, or a worker does not start
(``VLLM_SSM_CONV_STATE_LAYOUT=DS``), so that each of the parts that follow one another in it is in
one piece:

- Mamba2: the channels of x, which are the heads', then those of B and C, which are the groups'. A
  rank has the groups of its heads; where there is one group for all heads, every rank has it.
- gated delta nets: the channels of queries and keys, which are the key heads', then of values.
- Mamba1: channels alone, as in its state space.

What no rule here is about is divided by nobody: an allow-list.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.state_shares import Part, Rank, SharedState
from kvpatch.worker.release_worker import ReleaseWorker

#: What configurations of models call the number of Mamba2's groups.
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


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
