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
    several prompts with the parameters of one. Of several answers to a prompt (``n``) the first
    loads it, and D computes it for the others: P lets its blocks go when one has read them. The
    scheduler, to which requests may come by other ways, handles a wrong one as if it had no
    parameters, with an error in the log: this engine computes its prompt. So it does where P
    says that it holds no block, and where P is asked to read an earlier turn back that it would
    wait for in vain. A worker that knows the peer fails the load of a request that names blocks
    which the peer does not have, or too few.
Upstream:
    vLLM #51505 and its siblings.
Limits:
    That a client may name the blocks of other requests is vLLM's design
    (docs/explanation/security.md). Behind a MultiConnector the scheduler alone checks.
Remove when:
    The connector checks what it is sent.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from kvpatch._versions import GENERATIONS, Generation
from kvpatch.core.ledger import Patch
from kvpatch.core.text import shown
from kvpatch.patches import _sites
from kvpatch.vllm.allowed_peers import allowed_peers
from kvpatch.vllm.state import connectors_of
from kvpatch.vllm.transfer_params import (
    FIELD,
    Asked,
    Form,
    ParamsRefused,
    check,
    check_prompts,
    completed,
    loads_nothing,
    names_blocks,
)

_LOG = logging.getLogger("kvpatch.transfer_params")


def _server_add_request(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    form: Form,
) -> Any:
    """Raises what the server answers a bad request by, before anything is booked of it.

    The prompt may not be tokenized yet: how long it is the scheduler knows.
    """

    def add(request_id: str, prompt: Any, params: Any, *more: Any, **named: Any) -> Any:
        config = instance.vllm_config
        transfer = config.kv_transfer_config
        extra = getattr(params, "extra_args", None)
        if transfer is not None and transfer.kv_connector in _NIXL and extra:
            most = int(config.model_config.max_model_len)
            is_push = transfer.kv_connector == _PUSH
            asked = Asked(most, most, is_push, allowed_peers().allows)
            try:
                check(extra.get(FIELD), form, asked)
            except ParamsRefused as error:
                raise _bad_request(error) from None
        return wrapped(request_id, prompt, params, *more, **named)

    return add(*args, **kwargs)


def _bad_request(error: ParamsRefused) -> Exception:
    """What the release answers with status 400: from 0.27 on its own errors, and no ValueErrors."""
    kind = getattr(sys.modules.get("vllm.exceptions"), "VLLMValidationError", None)
    found: Exception = error if kind is None else kind(str(error), parameter=FIELD)
    return found


def _get_child_info(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def child(index: int) -> Any:
        request_id, sampling = wrapped(index)
        extra = getattr(sampling, "extra_args", None)
        if index and extra and names_blocks(extra.get(FIELD)):
            sampling = copy(sampling)  # one for all of them, where there is no seed
            sampling.extra_args = {name: it for name, it in extra.items() if name != FIELD}
        return request_id, sampling

    return child(*args, **kwargs)


def _create_completion(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    async def create(request: Any, *more: Any, **named: Any) -> Any:
        embedded = getattr(request, "prompt_embeds", None)
        try:
            check_prompts(request.kv_transfer_params, request.prompt, embedded)
        except ParamsRefused as error:
            return instance.create_error_response(str(error))
        return await wrapped(request, *more, **named)

    return create(*args, **kwargs)


def _add_request(
    wrapped: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    generation: Generation,
    form: Form,
) -> Any:
    def add(request: Any) -> Any:
        connector = getattr(sys.modules[generation.connector_module], generation.connector_class)
        for each in connectors_of(instance):
            if isinstance(each, connector):
                params = request.kv_transfer_params
                try:
                    check(params, form, _asked(instance, each, request))
                    if params:
                        request.kv_transfer_params = completed(params, form)
                except ParamsRefused as error:
                    request.kv_transfer_params = None
                    _LOG.error(
                        "request %s is taken without its parameters, and computed here: %s",
                        shown(request.request_id),
                        error,
                    )
        return wrapped(request)

    return add(*args, **kwargs)


def _asked(core: Any, connector: Any, request: Any) -> Asked:
    # A request that was refused at the server comes in to be ended, with another prompt.
    is_notice = getattr(request, "abort_immediately", False)
    most = int(core.max_model_len)
    return Asked(
        tokens=most if is_notice else int(request.num_prompt_tokens),
        most_tokens=most,
        pushes=hasattr(connector.connector_scheduler, "_push_pending_registrations"),
        allows=allowed_peers().allows,
    )


def _get_num_new_matched_tokens(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def matched(request: Any, num_computed_tokens: int) -> Any:
        found = wrapped(request, num_computed_tokens)
        scheduler = instance.connector_scheduler
        if found[0] and not hasattr(scheduler, "_push_pending_registrations"):
            reads_back = getattr(scheduler, "is_bidirectional_kv_xfer_enabled", False)
            reads_back = reads_back and not scheduler.use_host_buffer
            if loads_nothing(request.kv_transfer_params, reads_back=reads_back):
                return 0, False
        return found

    return matched(*args, **kwargs)


_PUSH = "NixlPushConnector"
_NIXL = ("NixlConnector", "NixlPullConnector", _PUSH)

# From 0.18 a list of block ids for each cache group.
_ONE_LIST = ("g0100", "g0101", "g0102", "g0110", "g0111", "g0130", "g0140", "g0160")
# From 0.13 P's name of a request.
_ONE_NAME = ("g0100", "g0101", "g0102", "g0110", "g0111")
# To 0.11.0 a rank is added to the port.
_ADDS_RANK = ("g0100", "g0101", "g0102", "g0110")
# From 0.21, which is in g0200, P may read an earlier turn back from D.
_ONE_WAY = (*_ONE_LIST, "g0180")

_SAVES_BY_ADDRESS = ("g0101", "g0102", "g0110", "g0111")

FORMS = {
    g.slug: Form(
        has_groups=g.slug not in _ONE_LIST,
        has_request_id=g.slug not in _ONE_NAME,
        formats_port=g.slug not in _ADDS_RANK,
        reads_back=g.slug not in _ONE_WAY,
        saves_by_address=g.slug in _SAVES_BY_ADDRESS,
    )
    for g in GENERATIONS
}

PATCH = Patch(
    slug="transfer_params",
    wire_affecting=False,
    sites={
        g.slug: {
            _sites.server_add_request(g): partial(_server_add_request, form=FORMS[g.slug]),
            _sites.create_completion(g): _create_completion,
            _sites.child_sampling(g): _get_child_info,
            _sites.add_request(g): partial(_add_request, generation=g, form=FORMS[g.slug]),
            _sites.get_num_new_matched_tokens(g): _get_num_new_matched_tokens,
        }
        for g in GENERATIONS
    },
    not_needed={},
    document=__doc__,
)
