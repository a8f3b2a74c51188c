"""The release's own scheduler, block manager and prefix cache included.

Which blocks a request has, which of them slid out of a window, what a chunk of
a prompt or a drafted token adds, and what of it goes to the other side is all
the release's doing; the lab only says that a step was computed.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np

from .case import EngineSpec
from .release import accepted, block_tokens_of_groups
from .scheduler import STOP_TOKEN, TO_BE_READ, Computation, Tracked, new_request, token_ids
from .standins import NoStructuredOutput


class CoreScheduler:
    """As `scheduler.Scheduler`; of several cache groups full attention is the first."""

    def __init__(self, config: Any, plan: Any, spec: EngineSpec, seed: int) -> None:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self._block_tokens = block_tokens_of_groups(plan)
        merge = getattr(kv_cache_utils, "generate_scheduler_kv_cache_config", None)  # from 0.11
        wanted = {
            "vllm_config": config,
            "kv_cache_config": merge([plan]) if merge else plan,
            "structured_output_manager": NoStructuredOutput(),
            # As the engine core has them.
            "block_size": math.lcm(*self._block_tokens),
            "hash_block_size": math.gcd(*self._block_tokens),
        }
        if not accepted(Scheduler, {"hash_block_size": 0}):  # <= 0.19 one is both
            wanted["block_size"] = wanted["hash_block_size"]
        kind = AsyncScheduler if spec.schedules_ahead else Scheduler
        self._core = kind(**accepted(Scheduler, wanted))
        self._core.max_num_scheduled_tokens = spec.step_tokens
        self._core.num_lookahead_tokens = spec.lookahead_tokens
        self.connector = self._core.connector
        self.spec = spec
        self._hasher = _block_hasher(config, wanted["hash_block_size"])
        #: By request, positions of tokens that others of its number have not (engine_api).
        self.edits: dict[str, tuple[int, ...]] = {}
        self._tracked: dict[str, Tracked] = {}
        self._answers: dict[str, Any] = {}
        self._metadata: list[Any] = []
        #: Requests that have been read, which the scheduler hears of with the next step.
        self._read: set[str] = set()
        #: Requests that workers have loaded, likewise.
        self._loaded: set[str] = set()
        #: Requests and blocks whose loads failed, likewise.
        self._failed: set[str] = set()
        self._invalid: set[int | str] = set()
        #: What the scheduler tells front ends of the connector, since somebody took it.
        self.told: list[Any] = []
        self._listen()
        self._scatter(seed)

    def _listen(self) -> None:
        make_stats = self._core.make_stats

        def heard(*stats: Any, **named: Any) -> Any:
            connector = stats[1] if len(stats) > 1 else None  # from 0.11
            if connector is not None:
                self.told.append(connector)
            return make_stats(*stats, **named)

        self._core.make_stats = heard

    def limit_chunks(self, tokens: int) -> None:
        """Has a step compute no more than so many tokens of a prompt, so that others run too."""
        self._core.scheduler_config.long_prefill_token_threshold = tokens

    def _scatter(self, seed: int) -> None:
        """Frees all blocks in another order: a new pool hands out neighbours."""
        pool = self._core.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        random.Random(seed).shuffle(blocks)
        blocks.sort(key=lambda block: block.block_id != 1)  # which a new pool hands out first
        pool.free_blocks(blocks)

    def prefill(self, number: int, request_id: str, prompt_tokens: int) -> Tracked:
        return self._add(number, request_id, prompt_tokens, dict(TO_BE_READ))

    def seed(self, number: int, request_id: str, prompt_tokens: int) -> Tracked:
        """Takes a prompt of this engine's own, whose blocks the prefix cache keeps."""
        tracked = self._add(number, request_id, prompt_tokens, None)
        self.note_windows(tracked, prompt_tokens)
        return tracked

    def receive(
        self, number: int, request_id: str, prompt_tokens: int, params: dict[str, Any]
    ) -> Tracked:
        """Takes a prompt of P's, which D loads or computes."""
        return self._add(number, request_id, prompt_tokens, params)

    def _add(
        self, number: int, request_id: str, prompt_tokens: int, params: dict[str, Any] | None
    ) -> Tracked:
        edits = self.edits.get(request_id, ())
        ids = token_ids(number, prompt_tokens, edits)
        request = new_request(
            request_id, ids, params, self._hasher, answer_tokens=self.spec.answer_tokens
        )
        self._core.add_request(request)
        tracked = Tracked(number, request, [], prompt_tokens, edits=edits)
        self._tracked[request_id] = tracked
        return tracked

    def compute(self) -> Computation | None:
        """Schedules a step; None once all prompts are computed."""
        output = self._core.schedule()
        if not output.num_scheduled_tokens:
            # Nothing to compute: the metadata goes with the next step.
            self._metadata.append(output.kv_connector_metadata)
            if self._read or self._loaded:
                self._update(Computation(output.kv_connector_metadata, (), output))
            return None
        computed = []
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._tracked[request_id]
            end = tracked.request.num_computed_tokens
            # Of a model with recurrent state P computes all tokens but the last.
            tracked.tokens = min(tracked.tokens, tracked.request.num_prompt_tokens)
            tracked.tables = self._tables(request_id)
            self._check_states(tracked, end - count)
            computed.append((tracked, range(end - count, end)))
        return Computation(output.kv_connector_metadata, tuple(computed), output)

    def _check_states(self, tracked: Tracked, start: int) -> None:
        """Raises where a request would go on from a recurrent state that it has not got."""
        if not self.spec.has_state or self.spec.state_mode == "none" or not start:
            return
        groups = self._core.kv_cache_config.kv_cache_groups
        for group, size, table in zip(groups, self._block_tokens, tracked.tables, strict=True):
            is_state = type(group.kv_cache_spec).__name__ == "MambaSpec"
            if is_state and not table[(start - 1) // size]:
                raise ValueError(f"{tracked.request.request_id} has no state behind {start} tokens")

    def computed(self, computation: Computation) -> None:
        """Answers prompts that are complete with a token, which ends them."""
        self._update(computation)

    def sent(self, request_ids: set[str]) -> None:
        """What has been read; the next step tells the scheduler."""
        self._read |= request_ids

    def loaded(self, request_ids: set[str]) -> None:
        """What has been received; the next step tells the scheduler."""
        self._loaded |= request_ids

    def failed(self, request_ids: set[str], block_ids: set[int | str]) -> None:
        """What could not be loaded, as the release names it; the next step tells the scheduler."""
        self._failed |= request_ids
        self._invalid |= block_ids

    def forget(self) -> None:
        """Empties the prefix cache, where no request holds a block."""
        self._core.kv_cache_manager.reset_prefix_cache()

    def status(self, request_id: str) -> str:
        return str(self._tracked[request_id].request.status.name)

    def free_blocks(self) -> int:
        return int(self._core.kv_cache_manager.block_pool.get_num_free_blocks())

    def worker_metadata(self) -> Any:
        """What the workers of another connector report with a step."""

    def _update(self, computation: Computation) -> None:
        of_workers = self.worker_metadata()
        sent, self._read = self._read, set()
        loaded, self._loaded = self._loaded, set()
        failed, self._failed = self._failed, set()
        invalid, self._invalid = self._invalid, set()
        from vllm.v1 import outputs as of_release

        kind = of_release.ModelRunnerOutput
        # 0.11.1 and 0.11.2 have arrays.
        sampled = str(kind.__annotations__["sampled_token_ids"])
        as_listed = np.array if "ndarray" in sampled else list
        ids = [tracked.request.request_id for tracked, _ in computation.computed]
        wanted = {
            "req_ids": ids,
            "req_id_to_index": {request_id: i for i, request_id in enumerate(ids)},
            "sampled_token_ids": [
                as_listed(self._answered(tracked, tokens.stop))
                for tracked, tokens in computation.computed
            ],
            "spec_token_ids": None,  # <= 0.10
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
            "finished_sending": sent,  # in 0.10.0
            "finished_recving": loaded,
        }
        if hasattr(of_release, "KVConnectorOutput"):
            said = {
                "finished_sending": sent,
                "finished_recving": loaded,
                "failed_recving": failed,  # from 0.30
                "invalid_block_ids": invalid,  # from 0.11.1
                "kv_connector_worker_meta": of_workers,
            }
            output = of_release.KVConnectorOutput
            wanted["kv_connector_output"] = output(**accepted(output, said))
        outputs = self._core.update_from_output(computation.output, kind(**accepted(kind, wanted)))
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._finished(output)

    def _answered(self, tracked: Tracked, place: int) -> list[int]:
        """The token behind so many, as a longer prompt of this number has it."""
        if place < tracked.tokens:
            return []
        is_last = place - tracked.tokens + 1 == self.spec.stops_after
        return [STOP_TOKEN] if is_last else token_ids(tracked.number, place + 1, tracked.edits)[-1:]

    def _finished(self, output: Any) -> None:
        self._answers[output.request_id] = output.kv_transfer_params
        tracked = self._tracked[output.request_id]
        tables = self._tables(output.request_id)
        if output.kv_transfer_params is None or not any(tables):  # freed at once
            return
        tracked.tables = tables
        # What P no longer has it need not keep.
        tracked.first_tokens = tuple(
            tokens * next((i for i, block in enumerate(table) if block), len(table))
            for tokens, table in zip(self._block_tokens, tracked.tables, strict=True)
        )

    def finish(self, tracked: Tracked) -> dict[str, Any] | None:
        """P's answer to a computed prompt: what the proxy forwards."""
        return self._answers[tracked.request.request_id]  # type: ignore[no-any-return]

    def answers(self) -> dict[str, dict[str, Any] | None]:
        return dict(self._answers)

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks, as for one that was there first."""
        request = self._core.requests[request_id]
        self._core.running.remove(request)
        self._core._preempt_request(request, time.monotonic())

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self._core.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def decode(
        self, number: int, request_id: str, prompt_tokens: int, hit: int, params: dict[str, Any]
    ) -> Tracked:
        """Schedules the same prompt on D; the prefix hit is what its cache has."""
        tracked = self._add(number, request_id, prompt_tokens, params)
        self._metadata.append(self._core.schedule().kv_connector_metadata)
        manager = self._core.kv_cache_manager
        if tracked.request.status.name == "WAITING_FOR_REMOTE_KVS":
            # What is loaded is not hashed before it is there.
            blocks = manager.coordinator.get_blocks(request_id)[0]
            hashed = [block for block in blocks if block.block_hash is not None]
            found = len(hashed) * self._block_tokens[0]
            if found != hit:
                raise ValueError(f"the case expects a prefix hit of {hit} tokens, D has {found}")
            # Of a model with recurrent state the last token is computed here. In 0.10 nothing
            # counts as computed before it is there.
            tracked.tokens = tracked.request.num_computed_tokens or tracked.tokens
            tracked.external_tokens = tracked.tokens - found
        else:  # D computes it itself
            tracked.tokens = hit
        tracked.tables = self._tables(request_id)
        self.note_windows(tracked, prompt_tokens)
        return tracked

    def note_windows(self, tracked: Tracked, prompt_tokens: int) -> None:
        """Books where each group's window begins, behind a prompt of so many tokens."""
        if self.spec.is_hybrid:
            managers = self._core.kv_cache_manager.coordinator.single_type_managers
            skipped = (one.get_num_skipped_tokens(prompt_tokens) for one in managers)
            tracked.first_tokens = tuple(skipped)

    def step(self) -> Any:
        if self._metadata:
            return self._metadata.pop(0)
        return self._core.schedule().kv_connector_metadata

    @property
    def is_ahead(self) -> bool:
        """Whether steps are scheduled of which the workers have not heard."""
        return bool(self._metadata)

    def _tables(self, request_id: str) -> list[list[int]]:
        return [list(ids) for ids in self._core.kv_cache_manager.get_block_ids(request_id)]


def _block_hasher(config: Any, block_tokens: int) -> Any:
    """As the engine core makes it; None in 0.10.0, where the block manager hashes."""
    from vllm.v1.core import kv_cache_utils

    hash_function = _hash_function(config.cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(hash_function)
    make = getattr(kv_cache_utils, "get_request_block_hasher", None)
    return make(block_tokens, hash_function) if make else None


def _hash_function(name: str) -> Any:
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
    except ImportError:  # <= 0.11.0
        import vllm.utils

        by_name = getattr(vllm.utils, "get_hash_fn_by_name", None)  # from 0.10.2
        return by_name(name) if by_name else vllm.utils.sha256
    return get_hash_fn_by_name(name)
