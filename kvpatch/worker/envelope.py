"""The messages that kvpatch adds to what the scheduler and the workers of one engine exchange.

vLLM pickles what its scheduler tells the workers in each step, and what each worker states for
handshakes. One attribute of these objects carries a message, a dictionary:

=================  =========  ==========================================  ========================
name               to         content                                     written by
=================  =========  ==========================================  ========================
``HOLDS``          workers    words of holds by request, 0 of one over    ``checks/grants``
``DIGEST_ORDERS``  workers    what is to be digested, by request          ``checks/grants``
``SAVES``          workers    blocks to be copied to the host buffer      ``host_buffer``
``RELEASES``       workers    releases of peers, by engine id             ``peer/other_releases``
``WORDS``          scheduler  what P states beside its release            ``peer/statement``
``TABLES``         scheduler  addresses of a worker's tables              ``checks/grants``
=================  =========  ==========================================  ========================

A process without kvpatch unpickles a message and ignores it, so that its values are plain ones.
What such a process must not ignore refuses to be unpickled there (``unpatched_workers``). A load's
own part is on the entry of that load (``load/read_request``): the worker may read it steps later.

The functions below take the places of the calls that exchange these objects, and of the one that
makes P's answer, each once for all patches (:class:`kvpatch.core.ledger.Step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from kvpatch.core.ledger import Method, Parts

HOLDS, DIGEST_ORDERS, SAVES, RELEASES = "holds", "digest orders", "saves", "releases"
WORDS, TABLES = "words", "tables"
_NAME = "_kvpatch_message"


def write_message(carrier: Any, message: Mapping[str, Any]) -> None:
    """Adds a message to an object of vLLM's that is about to be sent."""
    if message:
        setattr(carrier, _NAME, message)


def message_on(carrier: Any) -> dict[str, Any]:
    """Returns the message that an object of vLLM's brings; an empty one where it brings none."""
    found: dict[str, Any] | None = getattr(carrier, _NAME, None)
    return {} if found is None else found


def write_step(method: Method, parts: Parts) -> Method:
    """Replaces ``build_connector_meta`` of a connector's scheduler half.

    A part is (scheduler, scheduler's output) -> a function, or None. That function gets the
    metadata, and returns what is added to the message, or None.
    """

    @wraps(method)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        ends = []
        for part in parts.on:
            end = part(self, scheduler_output)
            if end is not None:
                ends.append(end)
        metadata = method(self, scheduler_output)
        message: dict[str, Any] = {}
        for end in ends:
            message.update(end(metadata) or {})
        write_message(metadata, message)
        return metadata

    return build_connector_meta


def read_step(method: Method, parts: Parts) -> Method:
    """Replaces ``bind_connector_metadata``; a part is (worker, message) -> nothing.

    The method is every connector's. Only NIXL's metadata brings a message, and a connector that
    is handed it may have no worker.
    """

    @wraps(method)
    def bind_connector_metadata(self: Any, connector_metadata: Any) -> Any:
        message = getattr(connector_metadata, _NAME, None)
        worker = getattr(self, "connector_worker", None) if message else None
        if worker is not None:
            for part in parts.on:
                part(worker, message)
        return method(self, connector_metadata)

    return bind_connector_metadata


def write_statement(method: Method, parts: Parts) -> Method:
    """Replaces ``get_handshake_metadata``; a part is (worker) -> what is added to the message."""

    @wraps(method)
    def get_handshake_metadata(self: Any) -> Any:
        metadata, worker = method(self), self.connector_worker
        if metadata is not None and worker is not None:
            write_message(metadata, {k: v for part in parts.on for k, v in part(worker).items()})
        return metadata

    return get_handshake_metadata


def read_statement(method: Method, parts: Parts) -> Method:
    """Replaces ``set_xfer_handshake_metadata``.

    A part is (scheduler, what its workers state) -> what the release is handed of it.
    """

    @wraps(method)
    def set_xfer_handshake_metadata(self: Any, metadata: Any) -> Any:
        for part in parts.on:
            metadata = part(self, metadata)
        return method(self, metadata)

    return set_xfer_handshake_metadata


def answer(method: Method, parts: Parts) -> Method:
    """Replaces ``request_finished``, which says whether P keeps a request's blocks, and its answer.

    A part is (connector, request, its blocks) -> a function, or None. That function gets what was
    returned, and returns what is returned instead.
    """

    @wraps(method)
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        ends = [part(self, request, block_ids) for part in parts.on]
        found = method(self, request, block_ids)
        for end in ends:
            if end is not None:
                found = end(found)
        return found

    return request_finished
