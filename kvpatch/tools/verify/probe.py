"""Brought into every worker by ``--worker-extension-cls``; answers ``/collective_rpc``.

The methods become methods of vLLM's worker, so each carries kvpatch's name. Arguments and results
cross as JSON; arguments must be strings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvpatch.tools.verify.caches import (
    ProbedLayer,
    StateCache,
    layer_caches,
    read_rows,
    read_state,
    state_caches,
)
from kvpatch.tools.verify.compare import NULL_BLOCK, STATE, digest_heads
from kvpatch.transfer.plane_bytes import plane_view

PREFILLED = "prefilled"
"""Fingerprint a request when the whole prompt has been computed: prefill and single engines."""

LOADED = "loaded"
"""Fingerprint a request before its first step: on a decode engine, what the transfer brought."""


@dataclass
class _SeenRequest:
    """A request whose prompt is not yet complete."""

    prompt_tokens: int
    block_ids: list[list[int]]


@dataclass
class Watch:
    """The notes of one worker on each request that passes through ``execute_model``.

    Lives on the worker it watches, so that two engines in one process share nothing.
    """

    moment: str
    layers: tuple[ProbedLayer, ...]
    states: tuple[StateCache, ...] = ()
    corrupt: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)
    _pending: dict[str, _SeenRequest] = field(default_factory=dict)

    def before(self, step: Any) -> None:
        """Note the requests that the step begins with."""
        for new in step.scheduled_new_reqs:
            request = _SeenRequest(len(new.prompt_token_ids), [list(ids) for ids in new.block_ids])
            if self.moment == PREFILLED:
                self._pending[new.req_id] = request
                continue
            if self.corrupt:
                self._corrupt(request)
            self._record(new.req_id, request, new.num_computed_tokens)

    def after(self, step: Any) -> None:
        """Fingerprint the requests whose prompt the step has completed."""
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for req_id, block_ids, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[req_id] = tokens
            if req_id in self._pending and block_ids is not None:
                for held, new_ids in zip(self._pending[req_id].block_ids, block_ids, strict=True):
                    held.extend(new_ids)
        for req_id, tokens in computed.items():
            request = self._pending.get(req_id)
            done = tokens + step.num_scheduled_tokens.get(req_id, 0)
            if request is not None and done >= request.prompt_tokens:
                del self._pending[req_id]
                self._record(req_id, request, tokens)

    def _record(self, req_id: str, request: _SeenRequest, computed_tokens: int) -> None:
        if self.states and self.moment == LOADED:
            # P stops before the last token, which D computes from the state behind all others.
            request = replace(request, prompt_tokens=computed_tokens)
        self.records.append(
            {
                "request": req_id,
                "prompt_tokens": request.prompt_tokens,
                "computed_tokens": computed_tokens,
                "block_ids": request.block_ids,
                "layers": {layer.name: self._digests(layer, request) for layer in self.layers}
                | {state.name: _state_digest(state, request) for state in self.states},
            }
        )

    def _digests(self, layer: ProbedLayer, request: _SeenRequest) -> dict[str, str]:
        end = request.prompt_tokens
        # The token that comes next attends to itself and to one token less than the window.
        first = 0 if layer.window_tokens is None else max(0, end - layer.window_tokens + 1)
        digests: dict[str, str] = {}
        for plane in layer.planes:
            rows = read_rows(layer, plane, request.block_ids[layer.group], first, end)
            digests.update(digest_heads(plane.content.value, plane.first_head, rows))
        return digests

    def _corrupt(self, request: _SeenRequest) -> None:
        """Spoil one block of every layer: the last whole one, or the only one.

        Every byte of the block is zeroed; a cache that did not matter would go unnoticed.
        """
        for layer in self.layers:
            ids = [block for block in request.block_ids[layer.group] if block != NULL_BLOCK]
            split = layer.block_tokens // layer.planes[0].counts.block_tokens
            whole = request.prompt_tokens // layer.block_tokens
            block = ids[max(0, min(whole, len(ids)) - 1)] * split
            for plane in layer.planes:
                plane_view(layer.tensor, plane)[block : block + split].zero_()
        for state in self.states:
            for tensor in state.tensors:
                tensor[_state_block(state, request)].zero_()


def _state_digest(state: StateCache, request: _SeenRequest) -> dict[str, str]:
    found, digests = read_state(state, _state_block(state, request)), {}
    for number, where in state.pieces:
        digests.update(digest_heads(STATE, number, found[None, None, where]))
    return digests


def _state_block(state: StateCache, request: _SeenRequest) -> int:
    return [block for block in request.block_ids[state.group] if block != NULL_BLOCK][-1]


class CacheProbe:
    """The RPCs. Mixed into vLLM's worker class, hence no ``__init__`` and no state of its own."""

    model_runner: Any
    execute_model: Callable[..., Any]

    def kvpatch_watch(self, moment: str) -> dict[str, Any]:
        """Start to fingerprint every request at ``moment``; again only changes the moment."""
        if moment not in (PREFILLED, LOADED):
            raise ValueError(f"expected {PREFILLED} or {LOADED}, found {moment!r}")
        watch = _watch_of(self)
        if watch is None:
            watch = Watch(moment, layer_caches(self), state_caches(self))
            _observe(self, watch)
        watch.moment = moment
        return {"layers": len(watch.layers) + len(watch.states)}

    def kvpatch_corrupt(self, on: str) -> dict[str, Any]:
        """Spoils a block of each later request before its first step, if ``"true"``."""
        watch = _watch_of(self)
        if watch is None:
            raise RuntimeError("kvpatch_corrupt needs kvpatch_watch first")
        watch.corrupt = on == "true"
        return {"corrupt": watch.corrupt}

    def kvpatch_records(self) -> list[dict[str, Any]]:
        """Every request noted since the last call."""
        watch = _watch_of(self)
        if watch is None:
            return []
        records, watch.records = watch.records, []
        return records

    def kvpatch_process_status(self) -> dict[str, Any]:
        """Returns the status of kvpatch in this worker's process."""
        import kvpatch

        return kvpatch.status().as_dict()


_WATCH = "_kvpatch_watch"


def _watch_of(worker: Any) -> Watch | None:
    watch: Watch | None = vars(worker).get(_WATCH)
    return watch


def _observe(worker: Any, watch: Watch) -> None:
    """Let ``watch`` see each step of this worker; its class and other workers stay as they are."""
    execute_model = worker.execute_model

    def observed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        watch.before(scheduler_output)
        result = execute_model(scheduler_output, *args, **kwargs)
        watch.after(scheduler_output)
        return result

    setattr(worker, _WATCH, watch)
    worker.execute_model = observed


def _ask_for_tiles() -> None:
    """Keeps a stock engine alive whose first prompt is short, on a CPU with AMX in bfloat16.

    vLLM's CPU backend uses AMX and does not ask Linux for it; kvpatch does at registration.
    """
    import torch

    import kvpatch
    from kvpatch.worker.vllm_bugs import may_use_amx

    if not kvpatch.status().enabled and torch.cpu._is_amx_tile_supported():
        may_use_amx()  # a worker of a device, or of float32, has no use for it


# In a worker, which brings its extension in before it computes anything; a command has no torch.
if "torch" in sys.modules:
    _ask_for_tiles()
