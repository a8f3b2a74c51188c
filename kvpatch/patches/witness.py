"""D notices a load whose bytes are not those of the prompt, without P's help.

Why:
    Whatever goes wrong with a load, D reports it as received and answers with HTTP 200: blocks
    that P had given to another request, a bug of the connector's, a mistake in a layout. The
    bytes are numbers like any others.
Where:
    D's scheduler and workers. P needs nothing. Off unless ``KVPATCH_WITNESS`` is ``log`` or
    ``enforce``.
How:
    After a full load D computes the prompt's last token, for what is sampled from it, and writes
    its keys and values over those that P sent. Before that step the worker keeps the sent ones of
    all layers (one gather), and compares them after it: from the second layer on they depend,
    through attention, on all of the loaded context. How far good loads are off is learnt from
    the first 64 of each P, by layer; what is twice as far is logged. With ``enforce`` what is
    four times as far is reported as blocks that could not be loaded, with the results of that
    very step: the scheduler drops what the step made of the request, and computes the prompt or
    ends the request, by ``kv_load_failure_policy``.
Upstream:
    vLLM #52234; SGLang has a check that needs both sides (#39500).
Limits:
    An alarm, no proof: a fault in the last layer alone is not seen, and a small one is seen now
    and then (docs/explanation/witness.md). Loads of which P has computed less than the
    last token (recurrent state, drafters), through windows that do not see the context, of resumed
    requests, and of caches whose numbers kvpatch does not read are counted as not witnessed.
    ``enforce`` only logs <= 0.11.0, with async scheduling, and with several cache groups.
Remove when:
    The connector checks what it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvpatch.connector.engine_steps import Around, amend, around, bind, build
from kvpatch.connector.registration import registration_step
from kvpatch.connector.state import held_by, scheduler_state
from kvpatch.connector.witness.loads import ExpectedLoads, has_loads
from kvpatch.connector.witness.witness import Witness, set_up
from kvpatch.core import seams, settings
from kvpatch.core.ledger import Patch, Site, Step, Switch, Wrapper
from kvpatch.core.releases import ReleaseFacts


def _build_metadata(scheduler: Any, output: Any) -> Callable[[Any], None] | None:
    waiting = scheduler._reqs_need_recv
    loads = held_by(scheduler, ExpectedLoads)
    if not waiting and (loads is None or not loads.are_open):
        return None  # as in most steps
    state = scheduler_state(scheduler)
    loads, waiting = state.of(ExpectedLoads), dict(waiting)
    if not loads.is_on:
        return None

    def expect(metadata: Any) -> None:
        loads.tell(scheduler, output, metadata, state.facts)
        loads.expect(scheduler, waiting, metadata, state.facts)

    return expect


def _witness_of(connector: Any) -> Witness | None:
    """Of NIXL's connector in a worker; every connector comes by here."""
    return held_by(getattr(connector, "connector_worker", None), Witness)


def _bind_metadata(worker: Any, metadata: Any) -> None:
    witness = held_by(worker, Witness)
    if witness is not None and (witness.waits_for_device or has_loads(metadata)):  # in few steps
        witness.before(metadata)


def _before_results(worker: Any) -> None:
    witness = held_by(worker, Witness)
    if witness is not None and witness.has_taken:
        witness.after()


def _load_errors(connector: Any, blocks: set[int]) -> set[int]:
    witness = _witness_of(connector)
    if witness is None or not witness.has_invalid_blocks:
        return blocks
    return blocks | witness.take_invalid_blocks()


def _update_requests_with_invalid_blocks(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    found = wrapped(*args, **kwargs)
    affected, _, blocks = found
    # vLLM lets others have blocks that it computes again, which may take several steps.
    if affected and blocks and settings.witness() == "enforce":
        instance.kv_cache_manager.evict_blocks(blocks)
    return found


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper | Step]:
    wish = settings.witness()
    found: dict[Site, Wrapper | Step] = {
        **registration_step(facts, partial(set_up, wish=wish)),
        seams.build_connector_meta(facts): Step(build, _build_metadata),
        seams.bind_connector_metadata(facts): Step(bind, _bind_metadata),
        seams.transfer_results(facts): Step(around, Around(before=_before_results)),
    }
    if wish == "log":
        return found  # which takes no load back
    if facts.failed_loads != "unknown":
        found[seams.get_block_ids_with_load_errors(facts)] = Step(amend, _load_errors)
    if facts.evicts_failed_blocks:
        site = seams.update_requests_with_invalid_blocks(facts)
        found[site] = _update_requests_with_invalid_blocks
    return found


PATCH = Patch(
    slug="witness",
    wire_affecting=False,
    sites=_sites,
    document=__doc__,
    switch=Switch(settings.WITNESS, settings.witness),
)
