"""Proof by content: what a peer's blocks are, where its handshake does not say all of them.

D computes the first prompt of such an engine itself, and P holds the same prompt: so some of P's
blocks of it are read, and only then is P told that it may let go of them. On releases <= 0.11.0
they show the size of items, and on 0.10.0 the layout: the one under which they hold what D has
computed, much nearer than under the other. From 0.11.1 to 0.20 they show how blocks are cut
(:mod:`kvpatch.legacy.content_proof.kernel_block_splits`). Block ids come from a client, and say
only where to look: where they are wrong, nothing is found, or what is found is as true as
elsewhere. Where nothing is proven, nothing is ever loaded.

What tells one place of a prompt from another is that keys or values differ from place to place.
Prompts that repeat themselves do not count. Some models' keys and values depend neither on a
token's place nor on what is before it: there a client that had P compute the prompt with a block's
worth of other tokens in front could show a false cut.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpatch.connector.handshake.possible_geometries import GeometryName
from kvpatch.connector.reading.ambiguous_peers import AmbiguousPeers
from kvpatch.connector.recent_engines import RecentEngines
from kvpatch.core.errors import KvpatchError, NotProven
from kvpatch.core.text import one_line, shown
from kvpatch.legacy.content_proof.compare import (
    blocks_showing_layout,
    chunks_seen,
    chunks_showing_split,
    layout_shown,
)
from kvpatch.legacy.content_proof.kernel_block_splits import PromptChunk, possible_splits
from kvpatch.legacy.content_proof.readable_engines import ReadableReports
from kvpatch.legacy.content_proof.samples import (
    NOTHING,
    LandedBlocks,
    Sample,
    SampledPlanes,
    bytes_of_block,
)
from kvpatch.transfer.nixl import Ends, errors_of
from kvpatch.transfer.staged_read import StagedRead
from kvpatch.transfer.staging_pool import StagingPool
from kvpatch.transfer.unposted import Unposted

if TYPE_CHECKING:
    from kvpatch.connector.handshake.remote_ranks import RemoteRank
    from kvpatch.connector.local.local_geometry import LocalGeometry
    from kvpatch.connector.read_request import ReadRequest

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: Of prompts whose engines have not answered yet, and of those of a step.
_MOST_SAMPLES = 8
#: More of a peer's blocks than this are not read for a proof.
SAMPLE_BYTES = 16 * 1024**2


@dataclass
class AmbiguousPeer:
    """An engine of which something is open, the same for all of its ranks.

    Attributes:
        ranks: what each rank would be, by candidate; those that cannot be read are left out.
        admits: one for each rank; books it, by the candidate that is proven.
        possible: the candidates that are left.
        refusal: of the one that is proven, where it cannot be read.
    """

    ranks: dict[int, Mapping[GeometryName, RemoteRank]]
    admits: list[Callable[[GeometryName], None]]
    every: frozenset[GeometryName]
    possible: frozenset[GeometryName]
    refusals: Mapping[GeometryName, KvpatchError]
    refusal: KvpatchError | None = None

    def first(self) -> RemoteRank:
        """A rank, as any candidate: its regions are the same."""
        return next(iter(next(iter(self.ranks.values())).values()))

    @property
    def parts(self) -> frozenset[int]:
        """Into how many kernel blocks its blocks may be cut; empty where that is stated."""
        return frozenset(name for name in self.possible if isinstance(name, int))


@dataclass
class _Probe:
    engine_id: str
    peer: AmbiguousPeer
    candidates: Mapping[GeometryName, RemoteRank]
    request_id: str
    read: StagedRead
    landed: LandedBlocks
    chunks: tuple[PromptChunk, ...]
    notify: Callable[[], None]


class ContentProver(AmbiguousPeers):
    """What one worker has proven of its peers, and what it is about to.

    Args:
        sampled: what is compared; None where nothing can be.
        pool: makes memory that samples land in.
        reports: where engines are booked that can be read.
    """

    def __init__(
        self,
        ours: LocalGeometry,
        sampled: SampledPlanes | None,
        pool: StagingPool,
        reports: ReadableReports,
    ) -> None:
        self._ours = ours
        self._sampled = sampled
        self._pool = pool
        self._reports = reports
        self._peers: dict[str, AmbiguousPeer] = {}
        self._due: dict[str, ReadRequest] = {}
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._probes: list[_Probe] = []
        self._told = RecentEngines[None]()

    # -- what is known, handshakes included ----------------------------------------

    def add(
        self,
        engine_id: str,
        candidates: Mapping[GeometryName, RemoteRank],
        refusals: Mapping[GeometryName, KvpatchError],
        admit: Callable[[GeometryName], None],
    ) -> None:
        """Books a rank of an engine that has to be proven, or proven anew."""
        self._reports.unsettle(engine_id)
        stated = next(iter(candidates.values())).metadata
        every = frozenset(candidates) | frozenset(refusals)
        known = self._peers.get(engine_id)
        if (
            known is None
            or stated.tp_rank in known.ranks
            or known.first().metadata.tp_size != stated.tp_size
            or known.every != every
        ):
            known = AmbiguousPeer({}, [], every, every, refusals)
        known.ranks[stated.tp_rank] = candidates
        known.admits.append(admit)
        self._peers[engine_id] = known

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        self._peers.pop(engine_id, None)
        self._reports.settle(engine_id, block_tokens)

    def forget(self, engine_id: str) -> None:
        self._peers.pop(engine_id, None)
        self._reports.unsettle(engine_id)

    def is_ambiguous(self, engine_id: str) -> bool:
        return engine_id in self._peers

    @property
    def engine_ids(self) -> tuple[str, ...]:
        return tuple(self._peers)

    def ranks(self, engine_id: str) -> dict[int, RemoteRank]:
        peer = self._peers.get(engine_id)
        if peer is None:
            return {}
        return {number: next(iter(one.values())) for number, one in peer.ranks.items()}

    def require_proven(self, engine_id: str) -> None:
        """Refuses to load from an engine that is not proven.

        Raises:
            NotProven: it is not.
            PeerRefused: it is proven to be one that cannot be read.
        """
        peer = self._peers.get(engine_id)
        if peer is None:
            return
        if peer.refusal is not None:
            raise peer.refusal
        raise NotProven(
            f"engine {shown(engine_id)} cannot be read: this release's handshake does not state "
            "all of its blocks, and no prompt that both engines have computed has shown it yet",
            "let this engine compute such prompts (ENABLE_KVPATCH for its scheduler too), set "
            "KVPATCH_PEER_BLOCK_SIZE (and KVPATCH_PEER_LAYOUT on 0.10.0) to what it has, or use "
            "vLLM 0.21 or later",
        )

    # -- a step --------------------------------------------------------------------

    def computing(self, request_id: str, engine_id: str, request: ReadRequest) -> None:
        """Books a prompt of a peer's that the model computes in this step."""
        peer = self._peers.get(engine_id)
        is_over = peer is not None and peer.refusal is not None
        if is_over or self._reports.is_settled(engine_id):
            return
        if len(self._due) < _MOST_SAMPLES:  # a sample waits for the device
            self._due[request_id] = request

    def sample(
        self,
        nixl: Any,
        agent: str,
        notification: bytes,
        request_id: str,
        engine_id: str,
        request: ReadRequest,
    ) -> bool:
        candidates = self._candidates_to_sample(agent, request_id, engine_id)
        if candidates is None:
            return False
        peer = self._peers[engine_id]
        landed, chunks = self._plan(peer, candidates, request_id, request)
        if landed is None:
            return False

        def notify() -> None:
            try:
                nixl.send_notif(agent, notif_msg=notification)
            except errors_of(nixl) as error:
                _LOG.warning("%s was not told of a request: %s", agent, error)

        memory = next(iter(candidates.values())).planes[0].memory
        ends = Ends(self._ours.memory, memory, agent)
        landing = Unposted((), iter((landed.chunk,)))
        read = StagedRead(nixl, self._pool, landed, ends, notification, landing)
        read.start()
        self._probes.append(
            _Probe(engine_id, peer, candidates, request_id, read, landed, chunks, notify)
        )
        return True

    def _candidates_to_sample(
        self, agent: str, request_id: str, engine_id: str
    ) -> Mapping[GeometryName, RemoteRank] | None:
        """What the rank of that name may be, where a read of it can prove something."""
        peer = self._peers.get(engine_id)
        is_known = request_id in self._due or request_id in self._samples
        is_sampled = any(probe.engine_id == engine_id for probe in self._probes)
        if peer is None or peer.refusal is not None or not is_known or is_sampled:
            return None
        every = tuple(peer.ranks.values())
        return next((one for one in every if next(iter(one.values())).agent == agent), None)

    def _plan(
        self,
        peer: AmbiguousPeer,
        candidates: Mapping[GeometryName, RemoteRank],
        request_id: str,
        request: ReadRequest,
    ) -> tuple[LandedBlocks | None, tuple[PromptChunk, ...]]:
        """What to read of a peer, and what may lie there; None where nothing could tell."""
        sampled = self._sampled
        if sampled is None:
            return None, ()
        rank = next(iter(candidates.values()))
        most = SAMPLE_BYTES // bytes_of_block(rank, sampled.planes)
        parts = peer.parts
        if not parts:
            blocks = blocks_showing_layout(sampled, rank, request, most)
            return (LandedBlocks(rank, sampled.planes, blocks, 0), ()) if blocks else (None, ())
        sample = self._samples.get(request_id)
        computed = request.computed
        if sample is not None:
            known = sample.tokens
        elif computed is not None:
            known = sampled.range_of(request, computed)
        else:
            return None, ()
        chunks = chunks_showing_split(sampled, rank, parts, request, known, most)
        if not chunks:
            return None, ()
        found = sorted({chunk.block for chunk in chunks})
        probed = min(max(parts), rank.metadata.blocks - 1)
        return LandedBlocks(rank, sampled.planes, found, probed), chunks

    def end_step(self) -> None:
        """Takes samples of what the model has computed, and looks at what was read of peers."""
        for request_id, request in self._due.items():
            self._samples[request_id] = self._own(request)
        self._due.clear()
        for probe in tuple(self._probes):
            state = probe.read.state()
            if state == "PROC":
                continue
            self._probes.remove(probe)
            sample = self._samples.pop(probe.request_id, None)
            if state == "DONE" and sample and sample.values and probe.landed.has_landed:
                self._judge(probe, sample)
            elif state != "DONE":
                probe.notify()
            probe.read.release()
        self._forget()

    def _forget(self) -> None:
        """Lets go of the oldest samples that nobody has asked the peer for."""
        asked = {probe.request_id for probe in self._probes}
        waiting = [request_id for request_id in self._samples if request_id not in asked]
        for request_id in waiting[: max(0, len(waiting) - _MOST_SAMPLES)]:
            del self._samples[request_id]

    def _own(self, request: ReadRequest) -> Sample:
        if self._sampled is None or request.computed is None:
            return NOTHING
        try:
            return self._sampled.take(request, request.computed)
        except RuntimeError as error:  # torch cannot index or copy these tensors
            _LOG.warning("what this engine has computed cannot be looked at: %s", error)
            return NOTHING

    def _judge(self, probe: _Probe, sample: Sample) -> None:
        engine_id, peer = probe.engine_id, probe.peer
        if self._peers.get(engine_id) is not peer:
            return  # another one shook hands under its id meanwhile
        found, seen = self._found(probe, sample)
        if found is None:
            log = _LOG.debug if engine_id in self._told else _LOG.warning
            log(
                "engine %s is not known yet by what it holds (%s): its prompts are computed here. "
                "Do both have one model, --dtype and --kv-cache-dtype?",
                shown(engine_id),
                seen,
            )
            self._told[engine_id] = None
            return
        if found in peer.refusals:
            peer.refusal = peer.refusals[found]
            _LOG.warning("engine %s cannot be read: %s", shown(engine_id), peer.refusal)
            return
        metadata = probe.candidates[found].metadata
        for admit in peer.admits:
            admit(found)
        block_tokens = (metadata.block_tokens or 0) * (metadata.kernel_blocks_per_block or 1)
        self.settle(engine_id, block_tokens)
        words = one_line(f"{shown(engine_id)} can be read: it has {metadata}")
        _LOG.info("engine %s (%s)", words, seen)

    def _found(self, probe: _Probe, sample: Sample) -> tuple[GeometryName | None, str]:
        """(the candidate that is proven, what was seen in words)."""
        sampled, peer = self._sampled, probe.peer
        if sampled is None:
            return None, "nothing"
        if not peer.parts:
            layouts = {str(name): rank for name, rank in probe.candidates.items()}
            layout, distances = layout_shown(sampled, layouts, sample, probe.landed)
            words = ", ".join(f"{name} {value:.3f}" for name, value in distances.items())
            return layout, f"distances from 0 to 1: {words or 'too little to tell'}"
        rank = next(iter(probe.candidates.values()))
        seen = tuple(chunks_seen(sampled, rank, sample, probe.landed, probe.chunks))
        words = f"{len(seen)} of {len(probe.chunks)} pieces of a prompt found"
        if not seen:
            return None, words
        left = possible_splits(peer.parts, seen, probe.landed.first_written())
        # What contradicts all is no proof: begin anew.
        peer.possible = frozenset(left or peer.every)
        words += f", kernel blocks of a block: {sorted(left)[:8]}"
        return (next(iter(left)) if len(left) == 1 else None), words
