"""The scheduler's half of an engine: requests, blocks, and who calls what when.

The order of calls into the connector is that of vLLM's scheduler; the
connector, the request and the block objects are the release's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .case import EngineSpec
from .release import accepted

#: More prompts than a stage has.
_EDITED = 1_000_003
#: Ends an answer; no prompt has it.
STOP_TOKEN = 0


@dataclass
class Tracked:
    """A request on one engine."""

    number: int
    request: Any
    #: Per cache group the blocks from the first token on; block 0, vLLM's null
    #: block, where the tokens are out of the group's window.
    tables: list[list[int]]
    #: Tokens that are to be right on this engine once the request is ready.
    tokens: int
    #: Tokens that the connector said it will load.
    external_tokens: int = 0
    #: Per cache group the first token that the model will look at again.
    first_tokens: tuple[int, ...] = (0,)
    #: As a prompt's (engine_api).
    edits: tuple[int, ...] = ()

    def contents(self, tokens: range) -> np.ndarray[Any, Any]:
        """The number of the prompt that each of these tokens' keys and values belong to."""
        positions = np.asarray(tokens, dtype=np.int64)
        found = np.full(positions.size, self.number)
        for edit in self.edits:
            found[positions >= edit] += _EDITED * (edit + 1)
        return found

    def loaded_blocks(self, group: int, block_tokens: int) -> list[int]:
        """The blocks that a transfer may write to: none of a prefix hit's."""
        hit = (self.tokens - self.external_tokens) // block_tokens
        return [b for b in self.tables[group][hit:] if b]


@dataclass(frozen=True)
class Computation:
    """One step of the model: what the workers are told, and what it computes."""

    metadata: Any
    computed: tuple[tuple[Tracked, range], ...]
    output: Any = None


@dataclass
class BlockPool:
    """Hands out scattered blocks; block 0 is vLLM's null block."""

    free: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, spec: EngineSpec, seed: int) -> BlockPool:
        ids = list(range(2, min(spec.planned_blocks, spec.blocks)))
        random.Random(seed).shuffle(ids)
        return cls([1, *ids])  # a new pool hands out block 1 first

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise ValueError(f"the case needs {count} more blocks, {len(self.free)} are free")
        taken, self.free = self.free[:count], self.free[count:]
        return taken


class Scheduler:
    """Drives the scheduler-side connector of one engine."""

    def __init__(self, connector: Any, spec: EngineSpec, seed: int) -> None:
        self.connector = connector
        self.spec = spec
        self.pool = BlockPool.of(spec, seed)
        self._to_compute: list[Tracked] = []

    def prefill(self, number: int, request_id: str, prompt_tokens: int) -> Tracked:
        """Schedules a prompt on P, up to the step that computes it."""
        request = self._request(number, request_id, prompt_tokens, dict(TO_BE_READ))
        self.connector.get_num_new_matched_tokens(request, 0)
        block_ids = self.pool.take(self._blocks(prompt_tokens))
        self.connector.update_state_after_alloc(request, _blocks(block_ids, 0), 0)
        tracked = Tracked(number, request, [block_ids], prompt_tokens)
        self._to_compute.append(tracked)
        return tracked

    def compute(self) -> Computation | None:
        """The next step in which prompts are computed: all of them at once."""
        if not self._to_compute:
            return None
        computed = tuple((tracked, range(tracked.tokens)) for tracked in self._to_compute)
        self._to_compute = []
        return Computation(self.step(), computed)

    def computed(self, computation: Computation) -> None:
        """The step is over."""

    def finish(self, tracked: Tracked) -> dict[str, Any] | None:
        """Ends a computed prompt on P; the answer is what the proxy forwards."""
        from vllm.v1.request import RequestStatus

        request = tracked.request
        request.num_computed_tokens = tracked.tokens
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        if _takes_groups(self.connector):
            _, params = self.connector.request_finished_all_groups(request, (*tracked.tables,))
        else:
            _, params = self.connector.request_finished(request, tracked.tables[0])
        return params  # type: ignore[no-any-return]

    def decode(
        self, number: int, request_id: str, prompt_tokens: int, hit: int, params: dict[str, Any]
    ) -> Tracked:
        """Schedules the same prompt on D, with a prefix hit of `hit` tokens."""
        request = self._request(number, request_id, prompt_tokens, params)
        external, asynchronous = self.connector.get_num_new_matched_tokens(request, hit)
        tokens = hit + external if asynchronous else max(hit, prompt_tokens)
        block_ids = self.pool.take(self._blocks(tokens))
        blocks = _blocks(block_ids, hit // self.spec.block_tokens)
        self.connector.update_state_after_alloc(request, blocks, external)
        return Tracked(number, request, [block_ids], hit + external, external)

    def step(self) -> Any:
        return self.connector.build_connector_meta(_empty_output())

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // (self.spec.block_tokens * self.spec.contexts))

    def _request(
        self, number: int, request_id: str, prompt_tokens: int, params: dict[str, Any]
    ) -> Any:
        request = new_request(request_id, token_ids(number, prompt_tokens), params)
        on_new_request = getattr(self.connector, "on_new_request", None)
        if on_new_request is not None:
            on_new_request(request)
        return request


def token_ids(number: int, tokens: int, edits: tuple[int, ...] = ()) -> list[int]:
    """A prompt by its number, distinct from the first token on: prefixes of others are no hits.

    Args:
        edits: positions of tokens that others of its number have not.
    """
    start = 1 + 200 * (number // 100)
    found = [start + (i + 31 * number) % 100 for i in range(tokens)]
    for edit in edits:
        found[edit] += 100
    return found


#: What a proxy asks of P.
TO_BE_READ = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Waited:
    """How long requests have waited in D before its scheduler takes them; of this process."""

    seconds: float = 0.0


WAITED = Waited()


def new_request(
    request_id: str,
    token_ids: list[int],
    params: dict[str, Any] | None,
    block_hasher: Any = None,
    answer_tokens: int = 1,
) -> Any:
    """The release's own request, for an answer of so many tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(
        max_tokens=answer_tokens, ignore_eos=True, stop_token_ids=[STOP_TOKEN]
    )
    wanted = {
        "request_id": request_id,
        "prompt_token_ids": token_ids,
        "multi_modal_inputs": None,
        "multi_modal_kwargs": None,
        "multi_modal_hashes": None,
        "multi_modal_placeholders": None,
        "sampling_params": sampling,
        "pooling_params": None,
        "eos_token_id": None,
        "block_hasher": block_hasher,
    }
    request = Request(**accepted(Request, wanted))
    request.arrival_time -= WAITED.seconds
    request.kv_transfer_params = params  # what a sampling parameter may be is not asked here
    return request


def _blocks(block_ids: list[int], hashed: int) -> Any:
    """The release's KVCacheBlocks, the first `hashed` of them from the prefix cache."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    blocks = [KVCacheBlock(block_id) for block_id in block_ids]
    for block in blocks[:hashed]:
        block._block_hash = f"hash of {block.block_id}"
    return KVCacheBlocks((blocks,))


def _takes_groups(connector: Any) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    supports = getattr(base, "SupportsHMA", None)
    return supports is not None and isinstance(connector, supports)


def _empty_output() -> Any:
    """A scheduler step in which nothing is computed."""
    from vllm.v1.core.sched.output import SchedulerOutput

    make_empty = getattr(SchedulerOutput, "make_empty", None)
    return make_empty() if make_empty is not None else None
