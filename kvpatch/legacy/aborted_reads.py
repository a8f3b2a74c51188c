"""Staged reads of requests that are over (<= 0.15).

There the blocks of an aborted request may be another one's at once, so that nothing more of its
reads is placed. Reads are known by the object that they were made for, and not by the request's
name: on releases <= 0.13 a client may come back under the name of a request that it gave up,
between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakValueDictionary

from kvpatch.core import seams
from kvpatch.core.ledger import Site, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.read_request import ReadRequest, read_requests_of
from kvpatch.load.reader import Reader
from kvpatch.transfer.nixl import errors_of
from kvpatch.transfer.own_read import OwnRead
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.unlike_engines")


class AbortedReads:
    """The reads of one worker whose requests were aborted.

    kvpatch takes such a read out of the release's account, which would report it as received. It
    reports the request once nothing of it is on the wire any more. The scheduler then only frees
    the request's blocks.
    """

    def __init__(self) -> None:
        #: Of the requests that are wanted, and those among them that this step has brought.
        self._requests: dict[str, ReadRequest] = {}
        self._new: set[str] = set()
        #: Of requests that are over, as long as a read holds them, by identity.
        self._given_up: WeakValueDictionary[int, ReadRequest] = WeakValueDictionary()
        self._ending: dict[str, list[Any]] = {}
        #: Requests that the release has reported while a read of theirs still ended.
        self._reported: set[str] = set()

    def begin(self, requests: Mapping[str, ReadRequest]) -> None:
        """Books what the scheduler asks for in a step."""
        for request_id in requests.keys() & self._requests.keys():
            self._give_up(self._requests[request_id])
        self._requests.update(requests)
        self._new = set(requests)

    def end(self, worker: Any, request_ids: Collection[str]) -> None:
        """Gives up what was read for requests that are over.

        Args:
            request_ids: that ended before this step: what came with it is another request's.
        """
        for request_id in request_ids:
            request = None if request_id in self._new else self._requests.pop(request_id, None)
            if request is not None:
                self._give_up(request)
        self._new.clear()
        for request_id, entries in list(worker._recving_transfers.items()):
            left = [entry for entry in entries if not self._take(request_id, entry)]
            if not left:  # the release would take it for received
                del worker._recving_transfers[request_id]
            elif len(left) < len(entries):
                worker._recving_transfers[request_id] = left

    def _give_up(self, request: ReadRequest) -> None:
        self._given_up[id(request)] = request

    def _take(self, request_id: str, entry: Any) -> bool:
        read = entry[0] if isinstance(entry, tuple) else entry  # with a time <= 0.12
        if not isinstance(read, OwnRead):
            return False
        given_up = self._given_up.get(id(read.owner))
        if given_up is None or not read.void():
            return False
        self._ending.setdefault(request_id, []).append(read)
        return True

    def report(self, worker: Any, received: Collection[str]) -> set[str]:
        """Returns what the scheduler is to be told of, with what the release has found."""
        found = set(received)
        for request_id, reads in list(self._ending.items()):
            going = [read for read in reads if _is_going(read, worker.nixl_wrapper)]
            if going:
                self._ending[request_id] = going
                self._reported |= found & {request_id}
                found.discard(request_id)
                continue
            del self._ending[request_id]
            if request_id in self._reported:
                self._reported.discard(request_id)
                found.add(request_id)
            elif request_id not in worker._recving_transfers and request_id not in self._requests:
                found.add(request_id)
                if worker_state(worker).facts.keeps_load_metadata:
                    worker._recving_metadata.pop(request_id, None)
        return found


def _is_going(read: OwnRead, nixl: Any) -> bool:
    """True if a read that was given up has something on the wire; lets go of it otherwise."""
    errors = errors_of(nixl)
    try:
        if read.state() == "PROC":
            return True
    except errors as error:
        _LOG.warning("a read that was given up has failed: %s", error)
    try:
        read.release()
    except errors as error:
        _LOG.warning("a read that was given up could not be released: %s", error)
    return False


def _get_finished(wrapped: Callable[..., Any], instance: Any, finished_req_ids: set[str]) -> Any:
    worker = instance.connector_worker
    if worker is None or worker_state(worker).held(Reader) is None:
        return wrapped(finished_req_ids)
    reads = worker_state(worker).of(AbortedReads)
    reads.end(worker, finished_req_ids)
    sent, received = wrapped(finished_req_ids)
    return sent, reads.report(worker, received or ())


def _start_load_kv(wrapped: Callable[..., Any], instance: Any, metadata: Any) -> Any:
    if worker_state(instance).held(Reader) is not None:
        found = read_requests_of(metadata)
        loads = {name: request for name, request in found if any(request.local_blocks)}
        worker_state(instance).of(AbortedReads).begin(loads)
    return wrapped(metadata)


def sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    return {
        seams.start_load_kv(facts): _start_load_kv,
        seams.get_finished(facts): _get_finished,
    }
