"""Proof by content: in which layout a peer holds its cache, where its handshake does not say.

0.10.0 states neither NHD nor HND. Of a peer that may have either D computes the first
prompts itself, and P holds the same prompts: so a few of P's blocks of one are read, and
only then is P told that it may let go of them. The layout under which they hold what D has
computed, and much nearer than under the other, is P's. Where neither is, nothing is ever
loaded from it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpatch._errors import KvpatchError
from kvpatch.geometry import Content, Placement, Plane, Round
from kvpatch.geometry.plan import Plan
from kvpatch.transfer.nixl import Ends, errors_of
from kvpatch.transfer.pool import StagingPool
from kvpatch.transfer.staged import StagedRead
from kvpatch.transfer.tokens import first_tokens
from kvpatch.vllm.evidence import clearly_nearest, distance, telling_places, values_of
from kvpatch.vllm.orders import Order

if TYPE_CHECKING:
    import torch

    from kvpatch.vllm.caches import LayerCache
    from kvpatch.vllm.peers import OurSide
    from kvpatch.vllm.reader import Rank

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: What is compared of a prompt: its first tokens, in the first layer and in the last.
_SAMPLED_TOKENS = 256
#: Of prompts whose engines have not answered yet.
_MOST_SAMPLES = 8
#: More of a peer's blocks than this are not read for a proof.
SAMPLE_BYTES = 16 * 1024**2

_ANNOUNCED = "kvpatch can read engine "
_NOTHING: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

#: The layer and content of a plane, and its first tokens [token, head, channel, byte].
Sample = dict[tuple[str, Content], npt.NDArray[np.uint8]]


class LayoutUnknown(KvpatchError):
    """A request to be read from an engine whose layout is not proven."""


def announcement(engine_id: str) -> str:
    """How a worker tells its scheduler, in place of a request's id, that it can read an engine."""
    return _ANNOUNCED + engine_id


def announced(reported: Iterable[str]) -> dict[str, str]:
    """The engine that each announcement among reported requests is about."""
    return {name: name.removeprefix(_ANNOUNCED) for name in reported if name.startswith(_ANNOUNCED)}


@dataclass
class Unproven:
    """An engine whose layout is not known, which is one for all of its ranks.

    Attributes:
        ranks: what each rank would be in each layout.
        admits: one for each rank; books it, by the layout that is proven.
    """

    ranks: dict[int, Mapping[str, Rank]]
    admits: list[Callable[[str], None]]

    def first(self) -> Rank:
        """A rank, in a layout."""
        return next(iter(next(iter(self.ranks.values())).values()))


@dataclass
class _Probe:
    engine_id: str
    unproven: Unproven
    candidates: Mapping[str, Rank]
    request_id: str
    read: StagedRead
    landed: _Landed
    starts: Mapping[int, int]
    blocks: int
    notify: Callable[[], None]


class _Landed:
    """Where a sample lands, in place of the cache."""

    def __init__(self) -> None:
        self.bytes: npt.NDArray[np.uint8] | None = None

    def place(self, staging: torch.Tensor, placements: tuple[Placement, ...]) -> Callable[[], bool]:
        """Keeps a copy."""
        self.bytes = staging.cpu().numpy().copy()
        return lambda: True

    def settle(self) -> None:
        """Nothing is under way."""


class Proofs:
    """What one worker has proven of its peers' layouts, and what it is about to.

    Args:
        layers: of our own cache, in `tensors`.
        pool: makes memory that samples land in.
    """

    def __init__(
        self,
        ours: OurSide,
        layers: Mapping[str, LayerCache],
        tensors: Mapping[str, torch.Tensor],
        pool: StagingPool,
    ) -> None:
        names = list(layers)
        self._ours = ours
        self._planes = [
            plane for name in dict.fromkeys((names[0], names[-1])) for plane in layers[name].planes
        ]
        self._tensors = tensors
        self._pool = pool
        self._unproven: dict[str, Unproven] = {}
        self._settled: set[str] = set()
        self._announced: list[str] = []
        self._due: dict[str, Order] = {}
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._probes: list[_Probe] = []
        self._sampling: tuple[str, str, Order] | None = None
        self._told: set[str] = set()

    # -- what is known, handshakes included ----------------------------------------

    def open(
        self, engine_id: str, candidates: Mapping[str, Rank], admit: Callable[[str], None]
    ) -> None:
        """Books a rank of an engine that has to be proven, or proven anew.

        Args:
            candidates: what it would be in each layout.
            admit: books the one that is proven, by its layout.
        """
        self._settled.discard(engine_id)
        stated = next(iter(candidates.values())).statement
        known = self._unproven.get(engine_id)
        if (
            known is None
            or stated.tp_rank in known.ranks
            or known.first().statement.tp_size != stated.tp_size
        ):
            known = Unproven({}, [])
        known.ranks[stated.tp_rank] = candidates
        known.admits.append(admit)
        self._unproven[engine_id] = known

    def settle(self, engine_id: str) -> None:
        """Books an engine of which there is nothing to prove, or nothing more."""
        self._unproven.pop(engine_id, None)
        if engine_id in self._settled:
            return  # each worker says it once, and all together are heard
        self._settled.add(engine_id)
        self._announced.append(announcement(engine_id))

    def is_open(self, engine_id: str) -> bool:
        """Whether nothing may be read from an engine but for a proof."""
        return engine_id in self._unproven

    @property
    def open_engines(self) -> tuple[str, ...]:
        """Those of which nothing may be read."""
        return tuple(self._unproven)

    def ranks(self, engine_id: str) -> dict[int, Rank]:
        """Those of an engine that is not proven, in either layout."""
        unproven = self._unproven.get(engine_id)
        if unproven is None:
            return {}
        return {number: next(iter(one.values())) for number, one in unproven.ranks.items()}

    def check(self, engine_id: str) -> None:
        """Refuses to load from an engine that is not proven.

        Raises:
            LayoutUnknown: it is not.
        """
        if self.is_open(engine_id):
            raise LayoutUnknown(
                f"engine {engine_id} cannot be read: this release's handshake does not state the "
                "layout, and no prompt that both engines have computed has shown it yet; let "
                "this engine compute such prompts (ENABLE_KVPATCH for its scheduler too), use vLLM "
                "0.10.1 or later, or KVPATCH_UNSTATED_LAYOUT=same where both have one"
            )

    # -- a step --------------------------------------------------------------------

    def computing(self, request_id: str, engine_id: str, order: Order) -> None:
        """Books a prompt of a peer's that the model computes in this step."""
        if engine_id not in self._settled:
            self._due[request_id] = order

    @contextmanager
    def sampling(self, request_id: str, engine_id: str, order: Order) -> Iterator[None]:
        """While inside, the peer is told of the request when a sample of it has been read."""
        self._sampling = request_id, engine_id, order
        try:
            yield
        finally:
            self._sampling = None

    def post(self, nixl: Any, agent: str, notification: bytes) -> bool:
        """Reads a sample first, where that is what is being done; whether it tells the peer."""
        if self._sampling is None:
            return False
        request_id, engine_id, order = self._sampling
        unproven = self._unproven.get(engine_id)
        is_known = request_id in self._due or request_id in self._samples
        if (
            unproven is None
            or not is_known
            or any(probe.engine_id == engine_id for probe in self._probes)
        ):
            return False
        candidates = next(
            (
                one
                for one in tuple(unproven.ranks.values())
                if next(iter(one.values())).agent == agent
            ),
            None,
        )
        planned = None if candidates is None else self._plan(candidates, order)
        if candidates is None or planned is None:
            return False
        round_, starts, blocks = planned

        def notify() -> None:
            try:
                nixl.send_notif(agent, notif_msg=notification)
            except errors_of(nixl) as error:
                _LOG.warning("%s was not told of a request: %s", agent, error)

        memory = next(iter(candidates.values())).planes[0].memory
        landed = _Landed()
        nothing = Plan(*(_NOTHING,) * 5)
        read = StagedRead(
            nixl,
            self._pool,
            landed,
            Ends(self._ours.memory, memory, agent),
            notification,
            nothing,
            iter((round_,)),
        )
        read.start()
        self._probes.append(
            _Probe(
                engine_id,
                unproven,
                candidates,
                request_id,
                read,
                landed,
                starts,
                blocks,
                notify,
            )
        )
        return True

    def end_step(self) -> set[str]:
        """Takes samples of what the model has computed, and looks at what was read of peers.

        Returns what to tell the scheduler of.
        """
        for request_id, order in self._due.items():
            try:
                self._samples[request_id] = self._own(order)
            except RuntimeError as error:  # torch cannot index or copy these tensors
                _LOG.warning("what this engine has computed cannot be looked at: %s", error)
                self._samples[request_id] = {}
        self._due.clear()
        for probe in tuple(self._probes):
            state = probe.read.state()
            if state == "PROC" or (state == "DONE" and probe.request_id not in self._samples):
                continue
            self._probes.remove(probe)
            sample = self._samples.pop(probe.request_id, None)
            if state == "DONE" and sample is not None and probe.landed.bytes is not None:
                self._judge(probe, sample, probe.landed.bytes)
            elif state != "DONE":
                probe.notify()
            probe.read.release()
        while len(self._samples) > _MOST_SAMPLES:
            self._samples.popitem(last=False)
        found, self._announced = set(self._announced), []
        return found

    def _own(self, order: Order) -> Sample:
        computed = order.computed
        if computed is None:
            return {}
        tokens = min(computed.tokens, _SAMPLED_TOKENS)
        blocks = computed.blocks[: -(-tokens // self._ours.block_tokens)]
        return {
            (plane.layer, plane.content): first_tokens(
                self._tensors[plane.layer], plane, blocks, tokens
            )
            for plane in self._planes
        }

    def _plan(
        self, candidates: Mapping[str, Rank], order: Order
    ) -> tuple[Round, Mapping[int, int], int] | None:
        """What to read of a peer, where each region of it lands, and how many blocks of each.

        None where there is nothing that could tell: no whole block, or one that slid out of
        a window.
        """
        rank = next(iter(candidates.values()))
        statement = rank.statement
        found = order.remote_blocks[0]
        block_tokens = statement.block_tokens or self._ours.block_tokens
        blocks = found[: max(1, _SAMPLED_TOKENS // block_tokens)]
        regions = sorted({_region_of(rank, _plane_like(rank, plane)) for plane in self._planes})
        length = sum(statement.block_bytes[region] for region in regions)
        blocks = blocks[: SAMPLE_BYTES // length]
        if not blocks or 0 in blocks or max(blocks) >= statement.blocks:
            return None
        address, size, starts, end = [], [], {}, 0
        for region in regions:
            starts[region] = end
            for block in blocks:
                address.append(statement.addresses[region] + block * statement.stride_bytes[region])
                size.append(statement.block_bytes[region])
            end += len(blocks) * statement.block_bytes[region]
        lengths = np.array(size, dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        return (
            Round(np.array(address, dtype=np.int64), offsets, lengths, end, ()),
            starts,
            len(blocks),
        )

    def _judge(self, probe: _Probe, sample: Sample, landed: npt.NDArray[np.uint8]) -> None:
        distances = self._distances(probe, sample, landed)
        layout = clearly_nearest(distances) if distances else None
        shown = ", ".join(f"{name} {value:.3f}" for name, value in distances.items())
        engine_id = probe.engine_id
        if self._unproven.get(engine_id) is not probe.unproven:
            return  # another one shook hands under its id meanwhile
        if layout is None:
            log = _LOG.debug if engine_id in self._told else _LOG.warning
            log(
                "engine %s holds what this engine computes in no layout (distances from 0 to 1: "
                "%s): its prompts are computed here. Do both have one model, --dtype and "
                "--kv-cache-dtype?",
                engine_id,
                shown or "too little to tell",
            )
            self._told.add(engine_id)
            return
        for admit in probe.unproven.admits:
            admit(layout)
        self.settle(engine_id)
        _LOG.info("engine %s has layout %s (distances from 0 to 1: %s)", engine_id, layout, shown)

    def _distances(
        self, probe: _Probe, sample: Sample, landed: npt.NDArray[np.uint8]
    ) -> dict[str, float]:
        """By layout the mean over all sampled planes; empty where too little is there to tell."""
        found: dict[str, list[float]] = {name: [] for name in probe.candidates}
        for plane in self._planes:
            ours = sample.get((plane.layer, plane.content))
            if ours is None:
                continue
            dtype = self._tensors[plane.layer].dtype
            views = {
                name: _tokens_of(rank, plane, landed, probe.starts, probe.blocks)
                for name, rank in probe.candidates.items()
            }
            theirs = {name: view for name, (view, _, _) in views.items()}
            places = [place for _, place, _ in views.values()]
            mine, heads = _shared_heads(plane, next(iter(views.values()))[2])
            tokens = min(ours.shape[0], places[0].shape[0])
            telling = telling_places([place[:tokens, heads] for place in places])
            if telling is None:
                return {}
            own = values_of(ours[:tokens, mine][telling], dtype)
            for name, view in theirs.items():
                other = values_of(view[:tokens, heads][telling], dtype)
                found[name].append(distance(own, other))
        return {name: float(np.mean(values)) for name, values in found.items() if values}


def _plane_like(rank: Rank, plane: Plane) -> Plane:
    return next(p for p in rank.planes if (p.layer, p.content) == (plane.layer, plane.content))


def _region_of(rank: Rank, plane: Plane) -> int:
    """The region of a peer that one of its planes lies in."""
    statement = rank.statement
    return next(
        number
        for number, (start, length) in enumerate(
            zip(statement.addresses, statement.block_bytes, strict=True)
        )
        if start <= plane.address < start + length
    )


def _tokens_of(
    rank: Rank, ours: Plane, landed: npt.NDArray[np.uint8], starts: Mapping[int, int], blocks: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], Plane]:
    """([token, head, channel, byte], byte offset of each (token, head), plane) of a sample."""
    plane = _plane_like(rank, ours)
    region = _region_of(rank, plane)
    statement = rank.statement
    length = statement.block_bytes[region]
    shown = replace(
        plane,
        address=starts[region] + plane.address - statement.addresses[region],
        strides_bytes=plane.strides_bytes._replace(block=length),
        counts=plane.counts._replace(blocks=blocks),
    )
    array = shown.as_array(landed, 0).swapaxes(1, 2)
    counts, strides = shown.counts, shown.strides_bytes
    block, token, head = np.ogrid[:blocks, : counts.block_tokens, : counts.heads]
    places = block * length + token * strides.token + head * strides.head
    return array.reshape(-1, *array.shape[2:]), places.reshape(-1, counts.heads), plane


def _shared_heads(ours: Plane, theirs: Plane) -> tuple[slice, slice]:
    """The heads that both hold, as each counts them."""
    first = max(ours.first_head, theirs.first_head)
    end = min(ours.end_head, theirs.end_head)
    return (
        slice(first - ours.first_head, end - ours.first_head),
        slice(first - theirs.first_head, end - theirs.first_head),
    )
