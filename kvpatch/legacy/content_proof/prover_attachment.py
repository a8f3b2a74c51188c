"""Gives a worker that has registered its caches what proves of its peers what they leave open."""

from __future__ import annotations

from typing import Any

from kvpatch.connector.reading.ambiguous_peers import AmbiguousPeers
from kvpatch.connector.reading.reader import Reader
from kvpatch.connector.state import worker_state
from kvpatch.core import settings
from kvpatch.legacy.content_proof.prover import SAMPLE_BYTES, ContentProver
from kvpatch.legacy.content_proof.readable_engines import ReadableReports, tell_scheduler
from kvpatch.legacy.content_proof.samples import sampled_planes_of
from kvpatch.transfer.storageless import StoragelessCaches


def attach_prover(worker: Any) -> None:
    """Has a worker prove of its peers what their handshakes leave open."""
    state = worker_state(worker)
    reader, reports = state.reader, state.of(ReadableReports)
    if reader is None:
        state.ambiguous_peers = _NothingToProve(reports)
    elif not isinstance(reader.ambiguous_peers, ContentProver):
        state.ambiguous_peers = reader.ambiguous_peers = _prover(reader, reports)
    if state.facts.states_block_size:  # before that workers answer handshakes themselves
        metadata = worker.xfer_handshake_metadata
        tell_scheduler(metadata, may_be_ambiguous=_may_be_ambiguous(reader))


class _NothingToProve(AmbiguousPeers):
    """Of a worker whose cache cannot be read into: any peer is the release's to read."""

    def __init__(self, reports: ReadableReports) -> None:
        self._reports = reports

    def settle(self, engine_id: str, block_tokens: int = 0) -> None:
        self._reports.settle(engine_id, block_tokens)


def _prover(reader: Reader, reports: ReadableReports) -> ContentProver:
    """Proves by what is read into the worker's cache."""
    ours, destination = reader.ours, reader.destination
    layers = ours.layers if destination.layers is None else destination.layers
    caches = destination.caches if isinstance(destination.caches, StoragelessCaches) else None
    sampled = sampled_planes_of(ours, reader.groups, layers, destination.tensors, caches)
    return ContentProver(ours, sampled, reader.pool.aside(SAMPLE_BYTES), reports)


def _may_be_ambiguous(reader: Reader | None) -> bool:
    """Whether a peer's handshake may leave something open that this worker would prove."""
    if reader is None or settings.peer_block_size() is not None:
        return False
    sizes = reader.ours.kernel_sizes
    return reader.ours.misreads_blocks or (sizes is not None and sizes.cuts_some)
