"""Adds P's statement where each worker answers handshakes itself (``<= 0.11.0``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

from kvpatch.load.reader_attachment import can_read
from kvpatch.peer.cross_layer_metadata import listener_told
from kvpatch.peer.inspected_caches import InspectedCaches
from kvpatch.peer.stated_words import with_names, words_of
from kvpatch.worker.local_geometry import local_geometry_of
from kvpatch.worker.release_worker import ReleaseWorker


def words_in_answers(release: ReleaseWorker, own: InspectedCaches) -> AbstractContextManager[None]:
    """While inside, a worker that starts to answer handshakes adds its words to its answers.

    Args:
        own: what it is about to register.
    """
    if own.cache is None or not can_read(release, own):
        return nullcontext()
    layers, _, key_order = own.cache
    # The thread that answers handshakes never ends, and is not to keep the worker.
    this_worker, facts = ref(release.worker), release.facts

    def restate(metadata: Any) -> Any:
        asked = ReleaseWorker(this_worker(), facts)
        return with_names(metadata, words_of(asked, local_geometry_of(asked, layers, key_order)))

    return listener_told(release, restate)
