"""What the proofs do in an engine's workers: wrong bytes on purpose, and what has noticed them.

A request's own name says which fault comes over it, and when (:func:`marked`):

``D``  at D, when P has said that it held the blocks to the last byte and before the digests are
       compared.
``L``  at D, before the step in which the request first runs; after all that digests do, so that
       the witness alone is left.
``P``  at P, in blocks that it has digested and D has not read yet: when it is asked to.

Nothing of it is in ``kvpatch``; an engine gets it with ``--worker-extension-cls``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from experiments.engines.clock import Clock
from experiments.engines.lab_probe import LabProbe
from experiments.engines.load_faults import FAULTS, Layer, Load
from kvpatch.connector.witness.loads import loads_in
from kvpatch.geometry.segments import kernel_blocks
from kvpatch.transfer.plane_bytes import plane_view
from kvpatch.verify.caches import LayerCache, layer_caches

if TYPE_CHECKING:
    import torch

    from kvpatch.geometry.plane import Plane

LANDED, LOADED, HELD = "D", "L", "P"
_MARK = re.compile(r"kvfault([DLP])(\d+)x(\d+)x")
_OTHER = re.compile(r"kvother(\d+)x")
UNSEEN = "kvunseenx"
"""What begins the name of a request that D's witness is not told of."""

_MOST_OTHERS = 16
NAME = re.compile(_MARK.pattern + "[0-9a-f]{32}")
"""The name that a client gave such a request, in the one that an engine has for it."""


def marked(fault: str, moment: str, number: int) -> str:
    """What begins the name of a request that this fault is to come over."""
    return f"kvfault{moment}{list(FAULTS).index(fault)}x{number}x"


def is_other(number: int) -> str:
    """What begins the name of a request whose cache is kept as another prompt's of that number."""
    return f"kvother{number}x"


@dataclass
class Spoiler:
    """Of one worker.

    Attributes:
        is_p: of P's.
        others: by number what was kept of other prompts; 0 is for all that have none of their own.
        held: by request the blocks that P holds and has digested.
        spoilt: names of requests that a fault has come over.
        alarmed: those that digests have spoken against.
        taken_back: those whose step the witness has had dropped.
    """

    is_p: bool
    layers: tuple[LayerCache, ...]
    dtype: torch.dtype
    others: dict[int, list[Layer]] = field(default_factory=dict)
    held: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    spoilt: set[str] = field(default_factory=set)
    alarmed: set[str] = field(default_factory=set)
    taken_back: set[str] = field(default_factory=set)
    lock: Lock = field(default_factory=Lock)

    def come_over(self, moment: str, name: str, blocks: Sequence[int], tokens: int) -> None:
        """Does to a request's blocks what its name says, once, at the moment that it says."""
        mark = _MARK.search(name)
        if mark is None or mark[1] != moment:
            return
        with self.lock:
            if name in self.spoilt:
                return
            self.spoilt.add(name)
        fault, number = int(mark[2]), int(mark[3])
        found = [self._rows(layer, blocks, tokens) for layer in self.layers]
        load = Load(found, self._other(number), self.layers[0].block_tokens, random.Random(number))
        list(FAULTS.values())[fault](load)
        for layer, rows in zip(self.layers, found, strict=True):
            self._store(layer, blocks, rows)

    def keep_other(self, name: str, blocks: Sequence[int], tokens: int) -> None:
        """Keeps what a request has, where its name says so."""
        mark = _OTHER.search(name)
        if mark is not None and (not self.is_p or mark[1] == "0"):
            while len(self.others) > _MOST_OTHERS:
                del self.others[next(number for number in self.others if number)]
            kept = [self._rows(layer, blocks, tokens) for layer in self.layers]
            self.others[int(mark[1])] = kept

    def _other(self, number: int) -> list[Layer]:
        return self.others.pop(number, None) or self.others[0]

    def _rows(self, layer: LayerCache, blocks: Sequence[int], tokens: int) -> Layer:
        found = {}
        for plane in layer.planes:
            view = plane_view(layer.tensor, plane)
            kept = view[_own_blocks(layer, plane, blocks)].contiguous()
            rows = _by_token(kept, plane).flatten(0, 1)[:tokens].contiguous()
            found[plane.content.value] = rows.view(self.dtype).squeeze(-1)
        return found

    def _store(self, layer: LayerCache, blocks: Sequence[int], rows: Mapping[str, Any]) -> None:
        import torch

        for plane in layer.planes:
            new = rows[plane.content.value].unsqueeze(-1).view(torch.uint8)
            view, ids = plane_view(layer.tensor, plane), _own_blocks(layer, plane, blocks)
            kept = view[ids].contiguous()
            at = torch.arange(len(new))
            own_tokens = plane.counts.block_tokens
            _by_token(kept, plane)[at // own_tokens, at % own_tokens] = new
            view[ids] = kept


def _own_blocks(layer: LayerCache, plane: Plane, blocks: Sequence[int]) -> torch.Tensor:
    """A request's blocks as the tensor has them."""
    import torch

    split = layer.block_tokens // plane.counts.block_tokens
    return torch.as_tensor(kernel_blocks(list(blocks), split))


def _by_token(kept: torch.Tensor, plane: Plane) -> torch.Tensor:
    """[block, token, head, channel, byte] of a plane's blocks that are contiguous, as a view.

    In tiles, as a CPU with AMX has them, tokens and channels are two axes each.
    """
    shape = len(kept), *plane.counts[1:], plane.item_bytes
    return kept.view(shape).transpose(1, 2)


_SPOILER, _CLOCK = "_kvpatch_spoiler", "_kvpatch_clock"


class ProofProbe(LabProbe):
    """Brought into every worker by ``--worker-extension-cls``."""

    def kvpatch_faults(self, side: str) -> bool:
        """From now on requests are what their names say, at P or at D."""
        layers = layer_caches(self)
        spoiler = Spoiler(side == "P", layers, layers[0].tensor.dtype)
        setattr(self, _SPOILER, spoiler)
        _before_steps(self, spoiler)
        if spoiler.is_p:
            _behind_digests(spoiler)
        else:
            _beside_the_witness(spoiler)
            _before_digests(spoiler)
        return True

    def kvpatch_look_away(self) -> bool:
        """From now on the witness does not hear of loads whose names say so."""
        from kvpatch.connector.witness.witness import Witness

        before = Witness.before

        def heard(self: Any, metadata: Any) -> None:
            if not any(UNSEEN in load.request_id for load in loads_in(metadata)):
                before(self, metadata)

        Witness.before = heard  # type: ignore[method-assign]
        return True

    def kvpatch_clock(self) -> bool:
        """From now on what instruments do for single loads is timed."""
        clock = Clock()
        clock.start()
        setattr(self, _CLOCK, clock)
        return True

    def kvpatch_clocked(self) -> dict[str, float]:
        """Seconds by instrument, since the last call."""
        clock: Clock = getattr(self, _CLOCK)
        return clock.take()

    def kvpatch_spoil(self, name: str) -> list[str]:
        """Has the fault come over what P holds of a request; its name, or nothing where it is not
        digested yet. A list: vLLM's route makes a text of a bool, and "False" is true."""
        spoiler: Spoiler = getattr(self, _SPOILER)
        found = next((held for held in spoiler.held if name in held), None)
        if found is None:
            return []
        spoiler.come_over(HELD, found, *spoiler.held.pop(found))
        return [found]

    def kvpatch_noticed(self) -> dict[str, list[str]]:
        """Names of requests: spoilt ones, and those that spoke up against; since the last call."""
        from experiments.engines.lab_probe import _states
        from kvpatch.connector.witness.witness import Witness

        spoiler: Spoiler = getattr(self, _SPOILER)
        found = {"spoilt": sorted(spoiler.spoilt), "digest": sorted(spoiler.alarmed)}
        witnesses = [state.held(Witness) for state in _states()]
        alarms = [alarm for one in witnesses if one is not None for alarm in one.counts.latest]
        found["witness"] = sorted({alarm.request_id for alarm in alarms})
        found["taken_back"] = sorted(spoiler.taken_back)
        for names in (spoiler.spoilt, spoiler.alarmed, spoiler.taken_back):
            names.clear()
        for one in witnesses:
            if one is not None:
                one.counts.latest.clear()
        return found

    def kvpatch_witness(self) -> dict[str, Any]:
        """What the witness could not look at and why, and what it has learnt of good loads."""
        from experiments.engines.lab_probe import _states
        from kvpatch.connector.witness.witness import Witness

        witnesses = [found for state in _states() if (found := state.held(Witness)) is not None]
        causes: dict[str, int] = {}
        farthest = 0.0
        for witness in witnesses:
            for cause, loads in witness.counts.not_witnessed.items():
                causes[cause] = causes.get(cause, 0) + loads
            for peer in witness._peers.values():
                if peer.limits is not None:
                    farthest = max(farthest, float(peer.limits.max()))
        return {"not_witnessed": causes, "farthest_learnt": farthest}


def _before_steps(worker: Any, spoiler: Spoiler) -> None:
    """Keeps others, and has faults come over loads, before the steps in which they first run."""
    execute_model = worker.execute_model

    def executed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            tokens = len(new.prompt_token_ids)
            # P computes the same name in pieces, and has none of the later ones' blocks yet.
            if not spoiler.is_p and new.num_computed_tokens >= tokens - 1:
                spoiler.come_over(LOADED, new.req_id, new.block_ids[0], tokens)
        result = execute_model(scheduler_output, *args, **kwargs)
        for new in scheduler_output.scheduled_new_reqs:
            spoiler.keep_other(new.req_id, new.block_ids[0], len(new.prompt_token_ids))
        return result

    worker.execute_model = executed


def _beside_the_witness(spoiler: Spoiler) -> None:
    """Notes which loads it has had taken back."""
    from kvpatch.connector.witness.witness import Witness

    judge = Witness._judge

    def judged(self: Any, lens: Any, load: Any, distances: Any) -> None:
        before = self.counts.enforced
        judge(self, lens, load, distances)
        if self.counts.enforced > before:
            spoiler.taken_back.add(load.request_id)

    Witness._judge = judged  # type: ignore[method-assign]


def _before_digests(spoiler: Spoiler) -> None:
    """Has faults come over loads that have landed, before they are compared; D's one rank reads
    of one rank."""
    from kvpatch.transfer.digest_check import DigestCheck
    from kvpatch.transfer.load_proof import LoadProof

    answer, alarm = DigestCheck.answer, LoadProof.alarm

    def answered(self: Any, nixl: Any) -> bool | None:
        for table in self._tables:
            blocks = table.blocks
            if not blocks.first_token:
                ids = _scheduled(blocks.block_ids.tolist(), blocks.block_tokens, spoiler)
                spoiler.come_over(LANDED, self._proof.request_id, ids, table.end_token)
        return answer(self, nixl)

    def alarmed(self: Any, layer: str) -> None:
        spoiler.alarmed.add(self.request_id)
        alarm(self, layer)

    DigestCheck.answer = answered  # type: ignore[method-assign]
    LoadProof.alarm = alarmed  # type: ignore[method-assign]


def _scheduled(kernel_blocks: list[int], block_tokens: int, spoiler: Spoiler) -> list[int]:
    """Blocks as the scheduler counts them, of the tensor's own."""
    split = spoiler.layers[0].block_tokens // block_tokens
    return [block // split for block in kernel_blocks[::split]]


def _behind_digests(spoiler: Spoiler) -> None:
    """Notes what P has digested, so that it can be asked to spoil it."""
    from kvpatch.transfer.digest_maker import DigestMaker

    make = DigestMaker._make

    def made(self: Any, order: Any, came: float) -> None:
        make(self, order, came)
        (table,) = order.tables
        ids = _scheduled(table.blocks.block_ids.tolist(), table.blocks.block_tokens, spoiler)
        # The word's owner is asked by the request's name: is_held(name, word).
        spoiler.held[order.is_held.args[0]] = (ids, table.end_token)

    DigestMaker._make = made  # type: ignore[method-assign]
