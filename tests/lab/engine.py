"""One engine of a case: both halves of the release's connector over real memory."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy as copied
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import kvpatch
from kvpatch.checks.digest_check import DigestTable
from kvpatch.checks.tables import WORD_BYTES, HoldTable
from tests.storageless import StoragelessStandIn

from . import disguise, far_memory, release, standins
from .caches import UNMAPPED, Caches, all_layers, build, is_in_rows, layer_name
from .case import MIRRORED, STORAGELESS, XLA
from .compare import (
    UNSIGNED,
    Array,
    Element,
    Fault,
    compared,
    expected,
    flip_last_bit,
    numbers_of,
    slots,
)
from .core import CoreScheduler
from .engine_api import Ask, Checked, Prompt, Start
from .layer_kinds import KINDS
from .namespaces import HOST
from .scheduler import Scheduler, Tracked
from .standstill import is_idle, standstill

_POLL_SECONDS = 0.001
# NIXL's calls that are counted.
_COUNTED = ("make_prepped_xfer", "register_memory", "initialize_xfer", "prep_xfer_dlist")
#: What kvpatch registers that holds no tokens: the tables of holds and digests.
_TABLES = (HoldTable.size_bytes(), DigestTable.size_bytes())
# After the release has logged an error, how long it may take to act on it.
_GRACE_SECONDS = 0.5
#: Of a load that nothing is under way for.
_IDLE_SECONDS = 5.0


class Forgotten(RuntimeError):
    """The release has dropped a request without a word: nothing is under way that could end it."""


class Unfinished(RuntimeError):
    """The release neither finished nor failed a request in time."""


class LoadFailed(RuntimeError):
    """The release reported blocks that could not be loaded."""


#: On releases <= 0.11.0 kvpatch can only log that a load has failed.
_LOGGERS = ("vllm", "kvpatch")
#: So long an engine that stops waits for handshakes: its peers may stop behind it.
_HANDSHAKE_SECONDS = 5.0


class ErrorLog(logging.Handler):
    """Keeps what is logged as an error: the release's background threads only log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.first_seconds: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None and record.levelno < logging.ERROR:
            self.warnings.append(record.getMessage())
            return
        self.first_seconds = self.first_seconds or time.monotonic()
        self.errors.append(repr(error) if error is not None else record.getMessage())


class Engine:
    """P or D. Made for one case, then shut down."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.spec = spec = start.spec
        self.log = ErrorLog()
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self.log)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = os.environ.get(HOST, "127.0.0.1")
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(start.side_channel_port)
        os.environ["ENABLE_KVCACHED"] = "true" if spec.is_kvcacheds else "false"
        os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"  # the only one that is transferred
        release.shuffle(spec.shuffles)
        standins.processor(has_amx=spec.amx)
        self.descriptors = 0
        self.registrations = 0
        #: Descriptors prepared at handshakes, of peers' memory and of this engine's.
        self.prepared = 0
        self._counters_lock = threading.Lock()
        #: (address, bytes) of what NIXL was handed, the staging pools included, but for the
        #: tables.
        self.registered: list[tuple[int, int]] = []
        self.tracked: list[Tracked] = []
        self.sent: list[set[str]] = [set() for _ in range(spec.tp_size)]
        #: By rank, the loads that it has reported as received or failed.
        self.reported: list[set[str]] = [set() for _ in range(spec.tp_size)]
        self.before: list[list[Array]] = []
        #: Requests that have ended, as the scheduler tells workers in the next step.
        self.over: set[str] = set()

        backend = disguise.backend(release.backend("sparse" if spec.has_indexer else spec.family))
        layout = release.layout_name(spec)
        release.use_layout(layout)
        # A process plays many cases, and this torch has only the CPU: the device of the case
        # before, "npu" say, must not reach the configuration of this one.
        standins.set_device_type("cpu")
        self.config = release.vllm_config(spec, start.engine_id, "kv_both", start.extra_config)
        disguise.take_name(self.config)
        self.plan = release.kv_cache_config(spec, self.config)
        self.groups = release.groups_of_layers(spec, self.plan)
        self.block_tokens = [
            tokens // spec.parts for tokens in release.block_tokens_of_groups(self.plan)
        ]
        shared = release.slots(spec, self.plan)
        self.caches: list[Caches] = [
            build(spec, backend, layout, shared, release.state_spec(spec), self.plan, self._store)
            for _ in range(spec.tp_size)
        ]
        sharing = range(spec.layers, spec.layers + spec.sharing_layers)
        self.caches = [
            replace(caches, sharing=tuple(map(layer_name, sharing))) for caches in self.caches
        ]
        self.noise = np.random.default_rng(start.seed)
        self._fill()
        #: Each rank's caches on a device that has memory of its own.
        self.on_device: list[far_memory.DeviceTensors | far_memory.TensorsElsewhere] = []

        self._stand_in(backend)
        connector = release.connector_class(spec)
        self.scheduler = self._scheduler(connector)
        self.workers = []
        with self._in_workers():
            self._start_workers(connector)
        self.prepared = 0  # what registrations took
        self._share_handshake(self.scheduler.connector)

    def _start_workers(self, connector: type[Any]) -> None:
        spec = self.spec
        if is_in_rows(self.plan):  # workers have processes, where it is the command line's still
            self.config.cache_config.block_size = spec.block_tokens
        for rank in range(spec.tp_size):
            with self._as_rank(rank), self._as_stage(rank):
                self.workers.append(self._connector(connector, "WORKER"))
        for rank, worker in enumerate(self.workers):
            with self._as_rank(rank):
                self._count_on(release.nixl_of(worker).connector_worker.nixl_wrapper)
                if spec.device == "cuda" or is_in_rows(self.plan):
                    standins.number_devices(release.nixl_of(worker).connector_worker)
                tensors = self._registered(rank)
                if spec.allocation == "all_layers":
                    worker.register_cross_layers_kv_cache(all_layers(tensors), None)
                else:
                    worker.register_kv_caches(tensors)
                if spec.device == MIRRORED:
                    worker.set_host_xfer_buffer_ops(standins.copy_blocks)
            if self.pretends:
                standins.restore_remote_blocks(release.nixl_of(worker).connector_worker)

    @contextmanager
    def _in_workers(self) -> Iterator[None]:
        """While inside, kvpatch is off where workers are to be without it, here and all."""
        if not self.spec.stock_workers:
            yield
            return
        kvpatch.disable()
        try:
            yield
        finally:
            kvpatch.enable()

    def _as_rank(self, rank: int) -> AbstractContextManager[None]:
        spec = self.spec
        return standins.tensor_parallel(*((0, 1) if spec.has_stages else (rank, spec.tp_size)))

    @contextmanager
    def _as_stage(self, rank: int) -> Iterator[None]:
        """While inside, the configuration and the plan are those of one pipeline stage's worker."""
        if not self.spec.has_stages:
            yield
            return
        config, plan = self.config, self.plan
        self.config = copied(config)
        self.config.parallel_config = copied(config.parallel_config)
        self.config.parallel_config.rank = rank
        if plan is not None:
            names = set(map(layer_name, self.spec.layers_of(rank)))
            groups = [copied(group) for group in plan.kv_cache_groups]
            for group in groups:
                group.layer_names = [name for name in group.layer_names if name in names]
            self.plan = replace(plan, kv_cache_groups=groups)
        try:
            yield
        finally:
            self.config, self.plan = config, plan

    #: Makes the memory of a cache, flat.
    _store = staticmethod(torch.zeros)

    def _fill(self) -> None:
        """Noise, so that a byte that nobody has written shows."""
        for caches in self.caches:
            for memory in caches.memory:
                memory[:] = self.noise.integers(0, 256, memory.size, dtype=np.uint8)
                if self.spec.holds_numbers:
                    found = memory.view(UNSIGNED[self.spec.item_bytes])
                    found &= numbers_of(self.spec.item_bytes)
            if not caches.reservations:  # of which nothing is there yet
                self._clear_null_block(caches)

    def _clear_null_block(self, caches: Caches) -> None:
        """Block 0, to which nobody writes; caches are zeroed when they are made."""
        for layer in range(len(caches.layers)):
            caches.clear(layer, self.spec.kernel_blocks([0], layer))

    def _registered(self, rank: int) -> dict[str, Any]:
        """A rank's tensors as its device shows them."""
        tensors = self.caches[rank].tensors()
        if self.spec.has_stages:
            tensors = {layer_name(n): tensors[layer_name(n)] for n in self.spec.layers_of(rank)}
        if self.spec.device == XLA:
            self.on_device.append(far_memory.DeviceTensors(tensors))
            return self.on_device[rank].tensors
        if far_memory.asked() and not self.spec.device:
            self.on_device.append(far_memory.TensorsElsewhere(tensors))
            return dict(self.on_device[rank].tensors)
        if self.spec.device != STORAGELESS:
            return tensors
        # Layers that share a tensor go on doing so.
        shown = {id(tensor): StoragelessStandIn(tensor) for tensor in tensors.values()}
        return {name: shown[id(tensor)] for name, tensor in tensors.items()}

    def _stand_in(self, backend: type[Any]) -> None:
        disguise.take_connector_version(release.worker_modules())
        for module in release.worker_modules():
            standins.backend_choice(module, backend)
        is_gpu = not self.spec.device and far_memory.asked() == far_memory.GPU
        is_cuda = not self.spec.device and standins.must_pretend_cuda(self.spec.family)
        device = self.spec.device or ("cuda" if is_gpu or is_cuda else "cpu")
        self.pretends = device != "cpu" and not is_gpu
        if is_gpu:
            standins.use_gpu()
        else:
            standins.set_device_type(device)
        transfer = self.config.kv_transfer_config
        transfer.kv_buffer_device = "cuda" if device == "cuda" else "cpu"
        for inner in transfer.kv_connector_extra_config.get("connectors", ()):
            inner["kv_buffer_device"] = transfer.kv_buffer_device

    def _scheduler(self, connector: type[Any]) -> Scheduler | CoreScheduler:
        spec, seed = self.spec, self.start.seed
        if not spec.has_core:
            return Scheduler(self._connector(connector, "SCHEDULER"), spec, seed)
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            return CoreScheduler(self.config, self.plan, spec, seed)

    def _connector(self, connector: type[Any], role: str) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        wanted = {
            "vllm_config": self.config,
            "role": KVConnectorRole[role],
            "kv_cache_config": self.plan,
        }
        with set_current_vllm_config(self.config):
            return connector(**release.accepted(connector, wanted))

    def _count_on(self, agent: Any) -> None:
        make, register = agent.make_prepped_xfer, agent.register_memory
        initialize, prepare = agent.initialize_xfer, agent.prep_xfer_dlist

        def count_up(name: str, count: int) -> None:
            with self._counters_lock:  # each rank shakes hands in a thread of its own
                setattr(self, name, getattr(self, name) + count)

        def make_prepped_xfer(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("local_indices", args[2] if len(args) > 2 else ())
            count_up("descriptors", len(ids))
            return make(*args, **kwargs)

        def register_memory(descs: Any, *args: Any, **kwargs: Any) -> Any:
            found = [descs[i][:2] for i in range(descs.descCount())]
            count_up("registrations", sum(length not in _TABLES for _, length in found))
            self.registered += [one for one in found if one[1] not in _TABLES]
            return register(descs, *args, **kwargs)

        def initialize_xfer(operation: str, local: Any, *args: Any, **kwargs: Any) -> Any:
            is_probe, is_word = args[1] == agent.name, local[0][1] == WORD_BYTES
            if not (is_probe or is_word):
                count_up("descriptors", local.descCount())
            return initialize(operation, local, *args, **kwargs)

        def prep_xfer_dlist(name: str, descs: Any, *args: Any, **kwargs: Any) -> Any:
            count = getattr(descs, "descCount", None)
            # Rows of (address, bytes, device, stride, count), from 0.33.
            count_up("prepared", int(descs[:, 4].sum()) if count is None else count())
            return prepare(name, descs, *args, **kwargs)

        agent.make_prepped_xfer, agent.register_memory = make_prepped_xfer, register_memory
        agent.initialize_xfer, agent.prep_xfer_dlist = initialize_xfer, prep_xfer_dlist

    def _share_handshake(self, scheduler: Any) -> None:
        """As the engine core does after its workers have registered."""
        get = [getattr(w, "get_handshake_metadata", None) for w in self.workers]
        if get[0] is None:
            return
        with self._in_workers():
            metadata = {rank: g() for rank, g in enumerate(get)}
        if metadata[0] is None:
            return
        metadata = disguise.stated(pickle.loads(pickle.dumps(metadata)))
        aware = getattr(scheduler, "set_xfer_handshake_metadata_pp_aware", None)
        if aware is not None:
            has_stages = self.spec.has_stages
            aware({(r, 0) if has_stages else (0, r): m for r, m in metadata.items()})
        elif self.spec.has_stages:  # it joins what its workers state of their ranks
            scheduler.set_xfer_handshake_metadata({0: metadata[max(metadata)]})
        else:
            scheduler.set_xfer_handshake_metadata(metadata)

    # -- one request's life ------------------------------------------------

    def _compute(self) -> None:
        """Runs the model, if filling the blocks of the tokens it is given is that."""
        while computation := self.scheduler.compute():
            self._send(computation.metadata, computation.computed)
            self.scheduler.computed(computation)

    def decode(self, asks: Sequence[tuple[Ask, int]], seconds: float) -> int:
        """Loads prompts on D until all are there; returns the tokens loaded.

        Args:
            asks: each with as many tokens as D's own prefix cache has of it.
        """
        for ask, hit in asks:
            prompt, params = ask.prompt, json.loads(ask.answer) or {}
            if not params:
                raise Unfinished(f"P gave no transfer parameters for {prompt.name}")
            if isinstance(self.scheduler, CoreScheduler):
                self._serve_alone(self.scheduler, prompt, hit)
            tracked = self.scheduler.decode(prompt.number, prompt.name, prompt.tokens, hit, params)
            self.tracked.append(tracked)
            self._map(tracked)
            if os.environ.get(UNMAPPED):
                self.caches[0].unmap_one()
            if not isinstance(self.scheduler, CoreScheduler):
                self._write(tracked, range(hit))
        if any(hit for _, hit in asks) and not self.on_device:
            self._forget_loaded()
        self.before = self._held()
        waiting = {t.request.request_id for t in self.tracked if t.external_tokens}
        self._until_received(waiting, seconds)
        return sum(t.external_tokens for t in self.tracked)

    def _forget_loaded(self) -> None:
        """Fills what will be loaded with noise: what made the hit may have left the same there."""
        for caches in self.caches:
            for number, layer in enumerate(caches.layers):
                own = self._loaded(number)
                for plane in layer.planes if layer.pages is None else (layer.pages,):
                    old = plane[own]
                    noise = self.noise.integers(0, 256, old.nbytes, dtype=np.uint8)
                    plane[own] = noise.view(old.dtype).reshape(old.shape)

    def _serve_alone(self, scheduler: CoreScheduler, prompt: Prompt, tokens: int) -> None:
        """Has D compute a prompt's beginning itself, which its prefix cache then holds."""
        if not tokens:
            return
        # A hit leaves one token to compute at least.
        scheduler.seed(prompt.number, f"{prompt.name}-before", tokens + 1)
        self._compute()
        self._step()

    def settle(self, seconds: float) -> None:
        """Some steps without expectations: notifications of full local hits."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._step()
            time.sleep(_POLL_SECONDS)

    def _until_received(self, waiting: set[str], seconds: float) -> None:
        # A rank at a time reports; the engine's aggregator waits for all.
        left = [set(waiting) for _ in self.workers]
        nixl_workers = [release.nixl_of(worker).connector_worker for worker in self.workers]
        end = time.monotonic() + seconds
        idle_since: float | None = None
        self._step()
        while any(left):
            _, received, broken = self._finished()
            if broken:
                if not self.spec.patched:
                    # Some releases end in the step behind a handshake that failed. Whether that
                    # is this one or the next depends on when the handshake's thread says so.
                    self._step()
                    self._finished()
                raise LoadFailed(f"not loaded: {', '.join(broken)}")
            for still, done in zip(left, received, strict=True):
                still -= done
            now, failed = time.monotonic(), self.log.first_seconds
            if any(left) and failed and now > failed + _GRACE_SECONDS:
                raise LoadFailed("an error was logged, and the request stays where it is")
            waits = [worker for worker, still in zip(nixl_workers, left, strict=True) if still]
            idle_since = (idle_since or now) if all(map(is_idle, waits)) else None
            if waits and (now > end or (idle_since and now > idle_since + _IDLE_SECONDS)):
                kind = Unfinished if now > end else Forgotten
                found = standstill(nixl_workers)
                raise kind(f"not received: {sorted(set().union(*left))}\n{found}")
            time.sleep(_POLL_SECONDS)
            self._step()

    def _step(self) -> None:
        self._send(self.scheduler.step())

    def _send(self, metadata: Any, computed: Sequence[tuple[Tracked, range]] = ()) -> None:
        """One step of the workers, with the model's part in it where there is any."""
        metadata = pickle.dumps(metadata)
        with self._in_workers():
            self._run_workers(metadata, computed)

    def _run_workers(self, metadata: bytes, computed: Sequence[tuple[Tracked, range]]) -> None:
        loads_first = not release.loads_behind_models_part()
        for rank, worker in enumerate(self.workers):
            with self._as_rank(rank):
                worker.bind_connector_metadata(pickle.loads(metadata))
                if loads_first:
                    worker.start_load_kv(None)
        for tracked, tokens in computed:
            self._write(tracked, tokens)
        for rank, worker in enumerate(self.workers):
            with self._as_rank(rank):
                if not loads_first:
                    worker.start_load_kv(None)
                if computed:
                    worker.wait_for_save()
                worker.clear_connector_metadata()

    def _finished(self) -> tuple[list[set[str]], list[set[str]], list[str]]:
        with self._in_workers():
            return self._finished_in_workers()

    def _finished_in_workers(self) -> tuple[list[set[str]], list[set[str]], list[str]]:
        sent, received, broken = [], [], []
        for rank, worker in enumerate(self.workers):
            with self._as_rank(rank):
                results = getattr(worker, "get_transfer_results", None)
                if results is not None:  # from 0.30: failures of a request as such
                    found = results(set())
                    done = found.finished_sending, found.finished_recving
                    broken += [f"request {name}" for name in sorted(found.failed_recving)]
                    self.reported[rank] |= set(found.failed_recving)
                else:
                    done = worker.get_finished(self.over)
                self.reported[rank] |= set(done[1] or ())
                sent.append(set(done[0] or ()))
                received.append(set(done[1] or ()))
                errors = getattr(worker, "get_block_ids_with_load_errors", None)
                invalid = errors() if errors is not None else ()
                # With names of requests among them that one of kvpatch's checks has failed.
                broken += [f"block {b}" for b in sorted(b for b in invalid if isinstance(b, int))]
                broken += [f"check {b}" for b in sorted(b for b in invalid if isinstance(b, str))]
        self.over = set()
        return sent, received, broken

    # -- contents ----------------------------------------------------------

    def _elements(
        self, tracked: Tracked, tokens: range, *, seen: bool = False
    ) -> Iterator[Element]:
        """Each (plane array, index, expected elements) of a request's `tokens`.

        With `seen` only of those that the model will look at again.
        """
        spec = self.spec
        for rank, caches in enumerate(self.caches if spec.contexts == 1 else ()):
            for number in spec.layers_of(rank):
                layer = caches.layers[number]
                first = spec.first_head(rank, number)
                heads = range(first, first + spec.shape_of(number)[0])
                group = self.groups[number]
                start = max(tokens.start, tracked.first_tokens[group] if seen else 0)
                looked_at = range(start, tokens.stop)
                if spec.is_state(number):  # one for all tokens
                    yield from self._state_elements(tracked, tokens, rank, number)
                    continue
                table = spec.kernel_blocks(tracked.tables[group], number)
                rows = block_tokens = self.block_tokens[group]
                kind = KINDS.get(spec.kind_of(number))
                if kind is not None:
                    looked_at = kind.rows(looked_at, block_tokens)
                    rows = kind.rows_per_block(block_tokens)
                block, offset = slots(table, looked_at, rows)
                for plane, array in enumerate(layer.planes):
                    if kind is not None:
                        start = first if kind.has_heads else 0
                        heads = range(start, start + array.shape[2])
                    value = expected(
                        spec.content_of(number),
                        plane,
                        tracked.contents(looked_at),
                        looked_at,
                        heads,
                        array.shape[-1],
                        array.itemsize,
                    )
                    if spec.holds_numbers:
                        value &= numbers_of(spec.item_bytes)
                    yield array, block, offset, value

    def _state_elements(
        self, tracked: Tracked, tokens: range, rank: int, number: int
    ) -> Iterator[Element]:
        """As :meth:`_elements`, of a layer's state behind the last of the tokens."""
        spec = self.spec
        table = tracked.tables[self.groups[number]]
        blocks = table[(tokens.stop - 1) // spec.block_tokens_of(number) :]
        block, offset = slots(blocks, range(1), self.block_tokens[self.groups[number]])
        states = spec.states_of(number)
        sizes, mine = states.sizes(), states.elements(rank, spec.tp_size)
        for plane, array in enumerate(self.caches[rank].layers[number].planes):
            whole = expected(
                spec.content_of(number),
                plane,
                tracked.contents(range(tokens.stop - 1, tokens.stop)),
                range(1),
                range(1),
                sizes[plane],
                array.itemsize,
            )
            value = whole[..., mine[plane]]
            if spec.holds_numbers:
                value &= numbers_of(spec.state_item_bytes)
            yield array, block, offset, value

    def _map(self, tracked: Tracked) -> None:
        """Has pages behind a request's blocks, where the allocator hands them out late."""
        for caches in self.caches:
            for layer in range(len(caches.layers) if caches.reservations else 0):
                blocks = self.spec.kernel_blocks(tracked.tables[self.groups[layer]], layer)
                caches.map_blocks(layer, blocks, self.noise)
            if caches.reservations:
                self._clear_null_block(caches)

    def _write(self, tracked: Tracked, tokens: range) -> None:
        if not tokens:
            return
        self._map(tracked)
        with self._in_host_memory():
            for array, block, offset, value in self._elements(tracked, tokens):
                array[block, offset] = value

    @contextmanager
    def _in_host_memory(self) -> Iterator[None]:
        """While inside, what a device holds is in the caches here, and then on the device again."""
        for device in self.on_device:
            device.pull()
        yield
        for device in self.on_device:
            device.push()

    def check(self, spoils: bool) -> Checked:
        """Compares all requests; what is then spoilt must show, and is put back.

        Args:
            spoils: whether the cache is spoilt, where it was right.
        """
        for device in self.on_device:
            device.pull()
        found = [
            element
            for tracked in self.tracked
            if tracked.tokens
            for element in self._elements(tracked, range(tracked.tokens), seen=True)
        ]
        wrong, total = compared(found)
        stray = self._stray_bytes() if self.before else 0
        noticed = self._spoilt(found) if spoils and found and not (wrong or stray) else {}
        counts = self.descriptors, self.registrations, self.prepared
        return Checked(wrong, total, stray, *counts, noticed=noticed)

    def _spoilt(self, found: Sequence[Element]) -> dict[str, int]:
        """The negative controls: the elements that are wrong then, by the way to spoil a cache."""
        shifted = [
            (a, (block + 1) % a.shape[0], offset, value) for a, block, offset, value in found
        ]
        noticed = {"shifted by a block": compared(shifted)[0]}
        for name, spoil in self._faults(found):
            with self._put_back():
                spoil()
                noticed[name] = compared(found)[0]
        return noticed

    def _held(self) -> list[list[Array]]:
        """A copy of all memory, by rank."""
        return [[memory.copy() for memory in caches.memory] for caches in self.caches]

    def _put(self, held: Sequence[Sequence[Array]]) -> None:
        for caches, copies in zip(self.caches, held, strict=True):
            for memory, copy in zip(caches.memory, copies, strict=True):
                memory[:] = copy

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """What is done to the caches inside is undone."""
        held = self._held()
        yield
        self._put(held)

    def _faults(self, found: Sequence[Element]) -> Iterator[Fault]:
        """What spoils this cache, of what was loaded; the first two layers may be of two kinds."""
        yield "a flipped bit", partial(flip_last_bit, found[-1])
        if not any(tracked.external_tokens for tracked in self.tracked):
            return
        for layer in range(min(2, self.spec.layers)):
            yield f"layer {layer} left out", partial(self._undo_layer, layer)
        states = [n for n in range(self.spec.layers) if self.spec.is_state(n)]
        firsts = {self.spec.kind_of(n): n for n in reversed(states)}
        for number in firsts.values():
            arrays = [caches.layers[number].planes[0] for caches in self.caches]
            faults = self.spec.states_of(number).faults(arrays, self._loaded(number))
            yield from ((f"layer {number}: {name}", spoil) for name, spoil in faults)

    def _loaded(self, layer: int) -> list[int]:
        """The blocks that transfers may write to, in one layer's cache."""
        group, tokens = self.groups[layer], self.spec.block_tokens_of(layer)
        return self.spec.kernel_blocks(
            [b for tracked in self.tracked for b in tracked.loaded_blocks(group, tokens)], layer
        )

    def _undo_layer(self, layer: int) -> None:
        """Gives a layer of D's back what it held before the transfer."""
        own = self._loaded(layer)
        planes = [plane for caches in self.caches for plane in caches.layers[layer].planes]
        with self._put_back():
            self._put(self.before)
            before = [plane[own] for plane in planes]
        for plane, blocks in zip(planes, before, strict=True):
            plane[own] = blocks

    def _stray_bytes(self) -> int:
        """Bytes that changed outside the blocks that D was to fill."""
        with self._put_back():
            for caches in self.caches:
                self._blank(caches)
            after = self._held()
            self._put(self.before)
            for caches in self.caches:
                self._blank(caches)
            return sum(
                int(np.count_nonzero(new != memory))
                for caches, of_rank in zip(self.caches, after, strict=True)
                for new, memory in zip(of_rank, caches.memory, strict=True)
            )

    def _blank(self, caches: Caches) -> None:
        for number, layer in enumerate(caches.layers):
            own = self._loaded(number)
            for plane in layer.planes if layer.pages is None else (layer.pages,):
                plane[own] = 0

    def logged(self) -> list[str]:
        return list(self.log.errors)

    def stop(self) -> None:
        """Shuts both halves down; the caller lets go of the engine and collects.

        A NIXL agent spins in threads of its own until it is collected.
        """
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self.log)
        for worker in self.workers:
            agent = release.nixl_of(worker).connector_worker.nixl_wrapper
            for name in _COUNTED:
                vars(agent).pop(name)  # each holds this engine, and the agent its threads
        halves = [*self.workers, self.scheduler.connector]
        halves = [half for half in halves if hasattr(half, "shutdown")]
        ends = [threading.Event() for _ in halves]
        for half, has_met in zip(halves, ends, strict=True):
            # The listener looks at its stop event once a second.
            threading.Thread(target=_shut_down, args=(half, has_met), daemon=True).start()
        for has_met in ends:
            has_met.wait(_HANDSHAKE_SECONDS)


def _shut_down(connector: Any, has_met: threading.Event) -> None:
    """Shuts a half of an engine down, behind the handshake that it is at.

    A handshake that ends after the release has shut down is undone when the worker is collected.
    NIXL then frees what it prepared twice: as garbage, and for the worker.
    """
    worker = getattr(release.nixl_of(connector), "connector_worker", None)
    if worker is not None:
        worker._handshake_initiation_executor.shutdown(cancel_futures=True)
    has_met.set()
    connector.shutdown()
