"""D reports a load only once its bytes are those that P had computed.

Why:
    A wrong byte in a load is an answer over a wrong context, with HTTP 200. Whatever changes bytes
    between P's cache and D's (a bug of vLLM's, NIXL's, a driver's or ours), nobody looks.
Where:
    Schedulers and workers of both sides; like pairs too. ``KVPATCH_DIGEST=off``, the default,
    makes and asks for nothing; ``sample`` looks at some of a request's tokens, ``all`` at all.
How:
    When a request is over that D will read, P's scheduler has its workers digest it, as the step
    behind begins, on a thread; the numbers go into a table in host memory, and P's answer says
    where (``kvpatch_digest``, one string). A digest counts only if the word of the request's hold
    still stood when its bytes had been read, so that stale ones are never blessed. D reads the
    data, the word and the digest, digests what it has placed, and compares by layer, keys or
    values, head and range of tokens. Other bytes fail the load, and one line says where they are.
Upstream:
    None; sglang#39500 has a check of its own kind.
Limits:
    As ``stale_blocks``, without which there is none. Host buffers, recurrent state between
    unlike numbers of ranks and devices without streams are not covered. A P that promises no
    digest, or is too late with it, leaves the load unchecked, and it is counted as such.
Remove when:
    The connector compares what it has read with what P had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch.checks.digests import worker_digests
from kvpatch.checks.digests.digest_table import DigestTable
from kvpatch.checks.digests.promised import PromisedDigests, state_table
from kvpatch.core import seams, settings
from kvpatch.core.ledger import Patch, Site, Step, Switch, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.read_request import HOLD
from kvpatch.load.registration import registration_step
from kvpatch.worker.engine_steps import Around, around, bind, build
from kvpatch.worker.state import connector_scheduler, held_by, scheduler_state

# --- the workers ---------------------------------------------------------------


def _get_handshake_metadata(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    metadata, worker = wrapped(*args, **kwargs), instance.connector_worker
    address = None if worker is None else worker_digests.stated_address(worker)
    if metadata is not None and address is not None:
        state_table(metadata, address)
    return metadata


def _bind_metadata(worker: Any, metadata: Any) -> None:
    """Begins before the model runs: D waits, and the step may be one of many long prompts.

    ``stale_blocks`` comes first, and the words of new holds stand.
    """
    if held_by(worker, DigestTable) is not None:
        worker_digests.hear(worker, metadata)


def _take_results(worker: Any, _: Any) -> None:
    """``stale_blocks`` comes first, and the words of what was sent are gone."""
    worker_digests.leave_freed_blocks(worker)


def _unregister_kv_caches(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    worker_digests.end_everything(instance)
    return wrapped(*args, **kwargs)


# --- the connector's scheduler half ----------------------------------------------


def _set_xfer_handshake_metadata(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def take(metadata: Any) -> Any:
        scheduler_state(instance).of(PromisedDigests).learn(metadata)
        return wrapped(metadata)

    return take(*args, **kwargs)


def _digests_of(connector: Any) -> PromisedDigests | None:
    """A connector's; None in workers, and where its workers have no tables."""
    digests = held_by(connector_scheduler(connector), PromisedDigests)
    return digests if digests is not None and digests.is_on else None


def _build_metadata(connector: Any, _: Any) -> Callable[[Any], None] | None:
    digests = held_by(connector_scheduler(connector), PromisedDigests)
    return digests.tell if digests is not None and digests.has_news else None  # in few steps


def _request_finished(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def finished(request: Any, block_ids: Any) -> Any:
        keeps_blocks, params = wrapped(request, block_ids)
        digests = _digests_of(instance)
        if digests is not None and keeps_blocks and HOLD in (params or {}):
            params = digests.promised(request, block_ids, params)
        return keeps_blocks, params

    return finished(*args, **kwargs)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    if not facts.listens_in_scheduler:
        return {}
    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts, worker_digests.make_table),
        seams.get_handshake_metadata(facts): _get_handshake_metadata,
        seams.bind_connector_metadata(facts): Step(bind, _bind_metadata),
        seams.transfer_results(facts): Step(around, Around(after=_take_results)),
        seams.set_xfer_handshake_metadata(facts): _set_xfer_handshake_metadata,
        seams.connector_meta(facts): Step(build, _build_metadata),
    }
    if facts.can_sleep:
        found[seams.unregister_kv_caches(facts)] = _unregister_kv_caches
    return found | dict.fromkeys(seams.request_finished(facts), _request_finished)


PATCH = Patch(
    slug="digests",
    wire_affecting=False,
    sites=_sites,
    not_needed="<= 0.11.0 P's scheduler does not know what its workers state, nor that they hold",
    document=__doc__,
    switch=Switch(settings.DIGEST, settings.digest),
)
