"""A request whose ``kv_transfer_params`` are wrong fails alone.

Why:
    The connector believes what clients send. A missing field, a text for a list of blocks or
    for a number, a host's name that is a list: each ends D's engine, in its scheduler, in a
    worker or in the step between, with all requests on it. Block ids that P does not have are
    read from another layer's blocks, a tensor-parallel size of millions eats the memory, and
    fewer blocks than the prompt fills fail an assertion.
Where:
    vLLM's API server, scheduler and workers, on P and D, like pairs included.
How:
    The parameters of a request are checked before the release uses them: types, ranges,
    lengths, what has to be there, and whether KVPATCH_ALLOWED_PEERS allows P's address. The
    API server answers one that is wrong with an error that names the field, and so it does
    several prompts with the parameters of one. The
    scheduler, to which requests may come by other ways, handles a wrong one as if it had no
    parameters, with an error in the log: this engine computes its prompt. Those of
    Mooncake's connector, which a MultiConnector asks before NIXL's, stay. It computes too where P
    says that it holds no block, and where P is asked to read an earlier turn back that it would
    wait for in vain. A worker that knows the peer fails the load of a request that names blocks
    which the peer does not have, or too few.
Upstream:
    vLLM #51505 and its siblings.
Limits:
    That a client may name the blocks of other requests is vLLM's design
    (docs/explanation/security.md). Behind a MultiConnector, or vLLM's Rust front end, the scheduler
    alone checks.
Remove when:
    The connector checks what it is sent.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from importlib import import_module
from typing import Any

from kvpatch.core import seams
from kvpatch.core.errors import ParamsRefused
from kvpatch.core.ledger import Patch, Site, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.guard.allowed_peers import allowed_peers
from kvpatch.guard.transfer_params import (
    FIELD,
    RequestLimits,
    check_prompts,
    checked,
    is_of_another,
    loads_nothing,
)
from kvpatch.worker.state import (
    connectors_of,
    engine_state,
    is_push,
    nixl_connectors_of,
    scheduler_state,
)

_LOG = logging.getLogger("kvpatch.transfer_params")


def _server_add_request(
    wrapped: Wrapped,
    instance: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *more: Any,
    facts: ReleaseFacts,
    **named: Any,
) -> Any:
    """Raises what the server answers a bad request by, before anything is booked of it.

    The prompt may not be tokenized yet: how long it is the scheduler knows.
    """
    config, extra = instance.vllm_config, getattr(params, "extra_args", None)
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector in _NIXL and extra:
        most = int(config.model_config.max_model_len)
        limits = RequestLimits(most, transfer.kv_connector == _PUSH, allowed_peers().allows)
        try:
            checked(extra.get(FIELD), facts, limits)
        except ParamsRefused as error:
            raise _bad_request(error, facts) from None
    return wrapped(request_id, prompt, params, *more, **named)


def _bad_request(error: ParamsRefused, facts: ReleaseFacts) -> Exception:
    """Returns an error that the release answers with status 400; from 0.27 that is vLLM's own."""
    if not facts.has_validation_errors:
        return error
    release = import_module("vllm.exceptions")
    found: Exception = release.VLLMValidationError(str(error), parameter=FIELD)
    return found


async def _create_completion(
    wrapped: Wrapped, instance: Any, request: Any, *more: Any, facts: ReleaseFacts, **named: Any
) -> Any:
    embedded, prompt = request.prompt_embeds, request.prompt
    if facts.skips_empty_prompts and embedded and prompt == "":
        prompt = None
    try:
        check_prompts(request.kv_transfer_params, prompt, embedded)
    except ParamsRefused as error:
        if _may_load(instance.engine_client.vllm_config.kv_transfer_config):
            return instance.create_error_response(str(error))
    return await wrapped(request, *more, **named)


def _may_load(transfer: Any) -> bool:
    """True if the engine's connector is NIXL's, or may be made of it or have it among others."""
    if transfer is None or transfer.kv_connector is None:
        return False
    is_named = transfer.kv_connector in (*_NIXL, "MultiConnector")
    return is_named or transfer.kv_connector_module_path is not None


def _add_request(wrapped: Wrapped, instance: Any, request: Any) -> Any:
    """Replaces a request's parameters by their checked form, or by none where they are refused."""
    facts = engine_state(instance).facts
    first = next(connectors_of(instance), None)
    # One that was refused is here to tell P of it: its prompt may be longer than any of ours.
    is_refused = getattr(request, "abort_immediately", False)
    most = sys.maxsize if is_refused else int(instance.max_model_len)
    for each in nixl_connectors_of(instance):
        scheduler = each.connector_scheduler
        limits = RequestLimits(most, is_push(scheduler), allowed_peers().allows)
        try:
            request.kv_transfer_params = checked(request.kv_transfer_params, facts, limits)
        except ParamsRefused as error:
            if is_of_another(request.kv_transfer_params) and each is not first:
                continue  # the one before it is asked first
            request.kv_transfer_params = None
            if is_refused:
                continue
            scheduler_state(scheduler).book.refuse(error)
            _LOG.error(
                "request %s is taken without its parameters, and computed here: %s",
                shown(request.request_id),
                error,
            )
    return wrapped(request)


def _get_num_new_matched_tokens(
    wrapped: Wrapped, instance: Any, request: Any, num_computed_tokens: int
) -> Any:
    if is_of_another(request.kv_transfer_params):
        return 0, False
    found = wrapped(request, num_computed_tokens)
    scheduler = instance.connector_scheduler
    facts = scheduler_state(scheduler).facts
    if found[0] and not is_push(scheduler):
        reads_back = facts.reads_back and scheduler.is_bidirectional_kv_xfer_enabled
        reads_back = reads_back and not scheduler.use_host_buffer
        if loads_nothing(request.kv_transfer_params, reads_back=reads_back):
            return 0, False
    return found


_PUSH = "NixlPushConnector"
_NIXL = ("NixlConnector", "NixlPullConnector", _PUSH)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    return {
        seams.server_add_request(facts): partial(_server_add_request, facts=facts),
        seams.create_completion(facts): partial(_create_completion, facts=facts),
        seams.add_request(facts): _add_request,
        seams.get_num_new_matched_tokens(facts): _get_num_new_matched_tokens,
    }


PATCH = Patch(slug="transfer_params", wire_affecting=False, sites=_sites, document=__doc__)
