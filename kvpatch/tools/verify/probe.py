"""Brought into every worker by ``--worker-extension-cls``; answers ``/collective_rpc``.

The methods become methods of vLLM's worker, so each carries kvpatch's name. Arguments and results
cross as JSON; arguments must be strings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import UnreadableGeometry
from kvpatch.core.installed import installed_facts
from kvpatch.geometry.dimension_order import DimensionOrder, KeyOrder
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.planes_of_tensors import read_planes
from kvpatch.geometry.segments import kernel_blocks
from kvpatch.geometry.state_shares import Rank
from kvpatch.tools.verify.compare import NULL_BLOCK, STATE, digest_heads
from kvpatch.transfer.plane_bytes import plane_view
from kvpatch.worker.kv_cache_groups import spec_of
from kvpatch.worker.local_geometry import total_of
from kvpatch.worker.recurrent_state import StateDivision, state_division
from kvpatch.worker.registered_caches import tensor_facts

if TYPE_CHECKING:
    import torch

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


# --- a worker's KV caches as planes -------------------------------------------------------
#
# It knows nothing of connectors, so that it reads an engine without one in the same way.

_COLUMN_MAJOR_ISAS = ("vec", "vec16")
_TILED_ISA, _TILED_BYTES = "amx", 2
"""CPU kernels whose keys lie [channel, slot]; others pack tiles in ways not known here."""

_ROW_MAJOR_ON_CPU = ("CUSTOM", "CPU_MLA", "FLEX_ATTENTION")
"""Backends on the CPU with plain rows: ``torch_attention``, and latents, which have no keys."""


@dataclass(frozen=True)
class ProbedLayer:
    """One layer's cache.

    Attributes:
        group: which of a request's block lists are this layer's.
        block_tokens: tokens of one block of that list; the tensor's own blocks may be smaller.
        window_tokens: how many of the last tokens the layer attends to, None for all.
    """

    name: str
    group: int
    block_tokens: int
    window_tokens: int | None
    tensor: torch.Tensor
    planes: tuple[Plane, ...]


#: Some bytes of a layer's states: its number among all that the whole model has, and where.
StatePiece = tuple[int, slice]


@dataclass(frozen=True)
class StateCache:
    """One layer's recurrent state (Mamba): what it knows of all tokens, in one block.

    Attributes:
        group: which of a request's block lists are this layer's.
        tensors: each [block, ...], of one state.
        pieces: of a block's bytes, one state after the other, which other ranks have too or do not.
    """

    name: str
    group: int
    tensors: tuple[torch.Tensor, ...]
    pieces: tuple[StatePiece, ...]


_PIECES = 8
"""Of each part of a state, so that as many ranks have a piece each."""


def state_caches(worker: Any) -> tuple[StateCache, ...]:
    """Every layer with recurrent state; none for most models."""
    config = worker.vllm_config
    modules = config.compilation_config.static_forward_context
    ranks = config.parallel_config.tensor_parallel_size
    model = getattr(config.model_config, "hf_text_config", None)
    found = []
    for group, name, spec in _specs(worker.model_runner):
        if _is_state(spec):
            division = state_division(spec, ranks, model, installed_facts())
            pieces = pieces_of(division, Rank(worker.rank % ranks, ranks))
            found.append(StateCache(name, group, tuple(modules[name].kv_cache), pieces))
    return tuple(found)


def pieces_of(division: StateDivision, rank: Rank) -> tuple[StatePiece, ...]:
    """A rank's pieces; one of all bytes where nobody knows how ranks share them out."""
    parts = [(state.unit_bytes, part) for state in division.states for part in state.parts]
    if not parts or _PIECES % rank.ranks or any(part.units % _PIECES for _, part in parts):
        return ((0, slice(None)),)
    found: list[StatePiece] = []
    start = 0
    for place, (unit_bytes, part) in enumerate(parts):
        units, size = part.units_of(rank), part.units // _PIECES
        for piece in range(_PIECES):
            if piece * size in units:
                begins = start + (piece * size - units.start) * unit_bytes
                where = slice(begins, begins + size * unit_bytes)
                found.append((place * _PIECES + piece, where))
        start += len(units) * unit_bytes
    return tuple(found)


def read_state(layer: StateCache, block: int) -> npt.NDArray[np.uint8]:
    """All bytes of a block's states, one state after the other."""
    import torch

    parts = [tensor[block].contiguous().view(torch.uint8).flatten() for tensor in layer.tensors]
    result: npt.NDArray[np.uint8] = torch.cat(parts).cpu().numpy()
    return result


def layer_caches(worker: Any) -> tuple[ProbedLayer, ...]:
    """Every attention layer with a cache of its own, in the order of the cache groups.

    Raises:
        UnreadableGeometry: there is no cache, or a tensor's layout is not understood.
    """
    runner = worker.model_runner
    modules = worker.vllm_config.compilation_config.static_forward_context
    backends = _backends(runner)
    found = []
    for group, name, spec in _specs(runner):
        if _is_state(spec):
            continue
        module, backend = modules[name], backends.get(name)
        tensor = _only_tensor(name, module.kv_cache)
        planes = read_planes(
            name,
            tensor_facts(tensor),
            _dimension_order(name, tensor, backend, spec),
            key_order=_key_order(name, module, tensor, backend),
            first_head=first_head_of(worker, spec.num_kv_heads),
        )
        window = getattr(spec, "sliding_window", None)
        found.append(ProbedLayer(name, group, spec.block_size, window, tensor, planes))
    if not found:
        raise UnreadableGeometry(
            "the worker has no KV cache: is the model loaded, and not a pooling model?"
        )
    return tuple(found)


def _specs(runner: Any) -> Iterator[tuple[int, str, Any]]:
    """(number of the cache group, layer, what vLLM planned for it)."""
    for group, group_spec in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = group_spec.kv_cache_spec
        for name in group_spec.layer_names:
            yield group, name, spec_of(spec, name)


def _is_state(spec: Any) -> bool:
    return hasattr(spec, "shapes")


def read_rows(
    layer: ProbedLayer, plane: Plane, block_ids: Sequence[int], first_token: int, end_token: int
) -> npt.NDArray[np.uint8]:
    """Tokens ``first_token`` to ``end_token`` of a request: bytes [token, head, channel bytes].

    ``block_ids`` are the request's, in token order, in blocks of ``layer.block_tokens`` tokens.

    Raises:
        UnreadableGeometry: the blocks hold fewer tokens, or are not made of the tensor's own.
    """
    import torch

    own_tokens = plane.counts.block_tokens
    split, rest = divmod(layer.block_tokens, own_tokens)
    if rest or not split:
        raise UnreadableGeometry(
            f"layer {layer.name!r}: expected blocks of {layer.block_tokens} tokens to be made of "
            f"the tensor's own, found tensor blocks of {own_tokens}"
        )
    if end_token > len(block_ids) * layer.block_tokens:
        raise UnreadableGeometry(
            f"layer {layer.name!r}: expected blocks for {end_token} tokens, found {len(block_ids)} "
            f"of {layer.block_tokens} tokens"
        )
    own_ids = kernel_blocks(block_ids, split)
    first_block, last_block = first_token // own_tokens, -(-end_token // own_tokens)
    view = plane_view(layer.tensor, plane)
    index = torch.tensor(own_ids[first_block:last_block], device=layer.tensor.device)
    # [block, head, token, channel, byte] -> [token, head, channel bytes]
    gathered = view[index].reshape(-1, *plane.counts[1:], plane.item_bytes).permute(0, 2, 1, 3, 4)
    rows = gathered.reshape(-1, plane.counts.heads, plane.counts.channels * plane.item_bytes)
    skipped = first_block * own_tokens
    result: npt.NDArray[np.uint8] = rows[first_token - skipped : end_token - skipped].cpu().numpy()
    return result


def _only_tensor(name: str, cache: Any) -> torch.Tensor:
    """A layer's cache; older releases hold a list with one entry per virtual engine."""
    entries = cache if isinstance(cache, list | tuple) else [cache]
    if len(entries) != 1 or not hasattr(entries[0], "untyped_storage"):
        raise UnreadableGeometry(
            f"{name}: expected one tensor, found {[type(entry).__name__ for entry in entries]}"
        )
    tensor: torch.Tensor = entries[0]
    return tensor


def _backends(runner: Any) -> dict[str, Any]:
    return {
        name: group.backend
        for groups in runner.attn_groups
        for group in (groups if isinstance(groups, list) else groups.values())
        for name in group.layer_names
    }


def _dimension_order(name: str, tensor: torch.Tensor, backend: Any, spec: Any) -> DimensionOrder:
    """Returns the meaning of each dimension, by the backend that shaped the tensor.

    From 0.29 on no backend shapes its cache: every tensor is [block, head, token, packed] and only
    its strides differ. Latents (MLA) are seen without the head that they do not have.
    """
    if backend is not None and hasattr(backend, "get_kv_cache_shape"):
        return DimensionOrder.probe(backend.get_kv_cache_shape)
    if tensor.dim() == 3 and backend is not None and backend.is_mla():
        return DimensionOrder(("block", "token", "channel"))
    if tensor.dim() == 4:
        return DimensionOrder(
            ("block", "head", "token", "packed" if spec.head_size_v else "channel")
        )
    raise UnreadableGeometry(
        f"{name}: expected [block, head, token, packed] or a backend that says otherwise, "
        f"found shape {tuple(tensor.shape)}, strides {tensor.stride()}, backend {backend}"
    )


def _key_order(name: str, module: Any, tensor: torch.Tensor, backend: Any) -> KeyOrder:
    if tensor.device.type != "cpu" or (backend and backend.get_name() in _ROW_MAJOR_ON_CPU):
        return KeyOrder.ROW_MAJOR
    isa = getattr(module, "isa", None)
    if isa == _TILED_ISA and tensor.element_size() == _TILED_BYTES:
        return KeyOrder.TILED
    if isa not in _COLUMN_MAJOR_ISAS:
        raise UnreadableGeometry(
            f"layer {name!r}: expected a CPU kernel out of {_COLUMN_MAJOR_ISAS}, found {isa!r}, "
            "which packs keys in another way; --dtype float32 keeps an x86 CPU on them"
        )
    return KeyOrder.COLUMN_MAJOR


def first_head_of(worker: Any, heads: int) -> int:
    """The global number of the first of the KV heads that this rank has of a layer.

    Ranks beyond the heads hold copies, and so does every rank of a model with one latent (MLA).
    Layers of several numbers of heads (MiMo-V2) are numbered each by its own.
    """
    config = worker.vllm_config
    if config.model_config.use_mla:
        return 0
    ranks = int(config.parallel_config.tensor_parallel_size)
    rank, models = int(worker.rank % ranks), int(config.model_config.get_total_num_kv_heads())
    return rank * total_of(heads, ranks, models, frozenset()) // ranks


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
