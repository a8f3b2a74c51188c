"""An engine whose requests come, go and fail one by one, side by side."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

import kvpatch
from kvpatch.host_buffer.scheduler import HostBufferScheduler
from kvpatch.host_buffer.worker import HostBuffer
from kvpatch.load.reader import Loads, Reader
from kvpatch.transfer import staging_pool

from . import backend_shapes, channel, digest_faults, release, standins
from .compare import compared
from .core import CoreScheduler
from .engine import Engine, LoadFailed
from .engine_api import Ask, Left, Prompt, Seen, Served, Timed, Told
from .scheduler import WAITED, Computation, Scheduler, Tracked
from .standstill import standstill

_POLL_SECONDS = 0.001
_TIMED_POLL_SECONDS = 0.0001
_QUARANTINE_SECONDS = 0.5
_REPORTED_SECONDS = 60.0
#: Of a load whose client is gone.
_OVER_SECONDS = 6.0
#: Steps that are timed together.
_IDLE_AT_ONCE = 50


class Player(Engine):
    """What `Engine` plays in one go, in the steps that a test chooses.

    One cache group: the requests' blocks come from `scheduler.Scheduler`, which
    never hands out a block twice, so that a late write is seen wherever it lands.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        staging_pool._QUARANTINE_SECONDS = _QUARANTINE_SECONDS
        WAITED.seconds = 0.0  # the process may have been another engine before
        self.digests = digest_faults.DigestFaults(self)
        self._received: list[set[str]] = [set() for _ in self.workers]
        self._broken: set[str] = set()
        self._by_name: dict[str, Tracked] = {}
        #: Requests that P has answered, and those whose blocks it has let go of.
        self._answered: set[str] = set()
        self._let_go: set[str] = set()
        self._copied = 0
        self._offered: list[str] = []
        #: A step that is scheduled and not computed.
        self._ahead: Computation | None = None
        self._has_unlike_copies = False

    # -- P -----------------------------------------------------------------

    def compute(self, prompts: Sequence[Prompt], chunk_tokens: int = 0) -> list[str]:
        """Computes prompts; returns what the proxy carries of each, as JSON.

        With `chunk_tokens`, one after the other and so many tokens in a step.
        """
        if chunk_tokens:
            computed = [self._compute_chunks(prompt, chunk_tokens) for prompt in prompts]
        else:
            computed = [self.scheduler.prefill(p.number, p.name, p.tokens) for p in prompts]
            self._compute()
        self.tracked += computed
        answers = [json.dumps(self.scheduler.finish(tracked)) for tracked in computed]
        self._step()
        return answers

    def _compute_chunks(self, prompt: Prompt, chunk_tokens: int) -> Tracked:
        """The scheduler tells the connector of the first chunk's blocks, once.

        The later ones' it finds in the steps' outputs, where it looks at them only
        for a host buffer.
        """
        scheduler = self._plain_scheduler()
        tracked: Tracked | None = None
        for start in range(0, prompt.tokens, chunk_tokens):
            end = min(prompt.tokens, start + chunk_tokens)
            if tracked is None:
                tracked = scheduler.prefill(prompt.number, prompt.name, end)
                computation = scheduler.compute()
                assert computation is not None
                self._send(computation.metadata)
            else:
                blocks = -(-end // self.spec.block_tokens)
                tracked.tables[0] += scheduler.pool.take(blocks - len(tracked.tables[0]))
                self._send(scheduler.step())
            self._write(tracked, range(start, end))
        assert tracked is not None
        tracked.tokens = prompt.tokens
        return tracked

    def part_copies(self) -> None:
        """From now on ranks' copies of a head differ in the last bits, as those of a CPU's do.

        The first rank that has a head computes what a D is to hold.
        """
        self._has_unlike_copies = True

    def _write(self, tracked: Tracked, tokens: range) -> None:
        super()._write(tracked, tokens)
        if not (tokens and self._has_unlike_copies):
            return
        held: set[tuple[int, int]] = set()
        found = list(self._elements(tracked, tokens))
        of_rank = len(found) // self.spec.tp_size
        for place, (array, block, offset, value) in enumerate(found):
            rank = place // of_rank
            first = self.spec.first_head(rank)
            names = [(place % of_rank, first + head) for head in range(value.shape[1])]
            copies = [head for head, name in enumerate(names) if name in held]
            held.update(names)
            value[:, copies] ^= value.dtype.type(rank)
            array[block, offset] = value

    def hand_on(self, name: str) -> None:
        """Has another request's tokens in a prompt's blocks, as after P has let go of them."""
        (tracked,) = (t for t in self.tracked if t.request.request_id == name)
        for array, block, offset, value in self._elements(tracked, range(tracked.tokens)):
            array[block, offset] = value ^ 1
        if self.spec.is_mirrored:  # D reads the mirror
            for worker in self.workers:
                for mirror in release.nixl_of(worker).connector_worker.host_xfer_buffers.values():
                    mirror.view(torch.uint8).bitwise_xor_(1)

    def digest_while_computing(self, first: Prompt, second: Prompt) -> str:
        """Answers a prompt in the step before the model computes another, as long as that takes.

        What has become of the first one's digest while the model still ran.
        """
        tracked = self.scheduler.prefill(first.number, first.name, first.tokens)
        self._compute()
        self.scheduler.finish(tracked)
        other = self.scheduler.prefill(second.number, second.name, second.tokens)
        self.tracked += [tracked, other]
        computation = self.scheduler.compute()
        assert computation is not None
        write, found = self._write, []

        def computed(*of: Any) -> None:
            found.append(self.digests.made(first.name))
            write(*of)

        self._write = computed  # type: ignore[method-assign]
        try:
            self._send(computation.metadata, computation.computed)
        finally:
            self._write = write  # type: ignore[method-assign]
        return ", ".join(found)

    def reorder_in_python(self) -> None:
        """STAND-IN: the operation by which the release reorders loads for a CPU."""
        standins.column_operation()

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Takes prompts that the release's own scheduler computes when it can."""
        for p in prompts:
            self._by_name[p.name] = self.scheduler.prefill(p.number, p.name, p.tokens)

    def begin_own(self, prompts: Sequence[Prompt]) -> None:
        for p in prompts:
            self._by_name[p.name] = self._core_scheduler().seed(p.number, p.name, p.tokens)

    def work(self) -> dict[str, str]:
        """Computes what can be; returns the answers since the last time, as JSON."""
        self._compute()
        self._step()
        return self.answers()

    def work_ahead(self) -> dict[str, str]:
        """Computes a step; returns its answers while the next one is scheduled and not computed."""
        computation = self.scheduler.compute()
        assert computation is not None
        self._send(computation.metadata, computation.computed)
        self._ahead = self.scheduler.compute()
        self.scheduler.computed(computation)
        return self.answers()

    def catch_up(self) -> int:
        """Computes what was scheduled ahead; returns how many tokens that were."""
        computation, self._ahead = self._ahead, None
        if computation is None:
            return 0
        self._send(computation.metadata, computation.computed)
        self.scheduler.computed(computation)
        return sum(len(tokens) for _, tokens in computation.computed)

    def answers(self) -> dict[str, str]:
        """P's answers since the last time, as JSON."""
        answers = self._core_scheduler().answers()
        new = {name: json.dumps(answers[name]) for name in answers if name not in self._answered}
        self._answered |= set(new)
        return new

    def tick(self) -> None:
        """One step of the model, or none where nothing can be computed."""
        self._tick()

    def _tick(self) -> Sequence[tuple[Tracked, range]]:
        """As :meth:`tick`; the tokens of each request that were computed."""
        computation = self.scheduler.compute()
        if self.spec.schedules_ahead and self.spec.stops_after:
            return self._tick_ahead(computation)
        if computation is None:
            self._step()
            return ()
        self._send(computation.metadata, computation.computed)
        self.scheduler.computed(computation)
        return computation.computed

    def _tick_ahead(self, computation: Computation | None) -> Sequence[tuple[Tracked, range]]:
        """Computes a step; the scheduler hears of the one before."""
        if computation is None:
            self._step()
        else:
            self._send(computation.metadata, computation.computed)
        before, self._ahead = self._ahead, computation
        if before is not None:
            self.scheduler.computed(before)
        return computation.computed if computation is not None else ()

    def preempt_ahead(self, name: str) -> dict[str, int]:
        """Preempts a prompt while a step of it is under way; returns P's host buffer then."""
        computation = self.scheduler.compute()
        assert computation is not None
        self._core_scheduler().preempt(name)
        held = self.host_blocks()
        self._send(computation.metadata, computation.computed)
        self.scheduler.computed(computation)
        return held

    def host_blocks(self) -> dict[str, int]:
        """kvpatch's account of P's host buffer."""
        table = self._host_buffer().table
        return {"free": table.free, "waiting": table.waiting, "held": table.held}

    def booked(self) -> set[str]:
        """Requests that kvpatch's account of P's host buffer still knows."""
        buffer = self._host_buffer()
        table = buffer.table
        holders = set().union(*table._holders)
        return {*buffer._refusals, *table._requests, *table._queue, *holders}

    def _host_buffer(self) -> HostBufferScheduler:
        from kvpatch.worker.state import scheduler_state

        connector = release.nixl_of(self.scheduler.connector)
        buffer = scheduler_state(connector.connector_scheduler).held(HostBufferScheduler)
        assert buffer is not None
        return buffer

    def buffer_bytes(self) -> dict[str, int]:
        """Of the first rank's host buffer: its size, that of its tensors' memory, and blocks."""
        pool = self._pools()[0]
        memory = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in pool.tensors.values()
        }
        held = sum(storage.nbytes() for storage in memory.values())
        return {"size": pool.size_bytes, "held": held, "blocks": pool.host_blocks}

    def exposed(self) -> tuple[int, int]:
        """How many regions NIXL was handed, and how many of them touch kvcached's memory."""
        owned = [r for caches in self.caches for r in caches.reservations]
        touching = [
            (start, length)
            for start, length in self.registered
            if any(start < r.address + r.size_bytes and r.address < start + length for r in owned)
        ]
        return len(self.registered), len(touching)

    def hand_over(self) -> int:
        """Hands copies over as a platform's runner does; how often they were called with that."""
        self._own_calls = 0

        def copies(*_: Any) -> None:
            self._own_calls += 1

        for worker in self.workers:
            worker.set_host_xfer_buffer_ops(copies)
        return self._own_calls

    def own_calls(self) -> int:
        return self._own_calls

    def watch_saves(self) -> None:
        """Counts blocks that are copied to the host buffer from now on."""
        for pool in self._pools():
            pool.save = self._counting(pool.save)

    def _counting(self, save: Any) -> Any:
        def counted(blocks: Sequence[int], rows: Sequence[int]) -> None:
            self._copied += len(blocks)
            save(blocks, rows)

        return counted

    def copied(self) -> int:
        return self._copied

    def spoil_saves(self, how: str) -> None:
        """From now on leaves out the first block of each save, or exchanges rows."""
        spoilt = {"skip": _without_the_first, "shift": _in_the_next_row}[how]
        for pool in self._pools():
            pool.save = spoilt(pool.save)

    def _pools(self) -> list[Any]:
        from kvpatch.worker.state import worker_state

        states = [worker_state(release.nixl_of(w).connector_worker) for w in self.workers]
        return [buffer.pool for state in states if (buffer := state.held(HostBuffer)) is not None]

    def heard(self, seconds: float, names: Sequence[str]) -> set[str]:
        """Those of `names` that P has heard were read, within some steps."""
        end = time.monotonic() + seconds
        is_core = isinstance(self.scheduler, CoreScheduler)
        while True:
            if not is_core:
                self._step()
            for rank, done in enumerate(self._finished()[0]):
                self.sent[rank] |= done
            found = set.intersection(*self.sent) & set(names)
            if is_core:
                # Other prompts may be under way, which a step computes as well.
                self._core_scheduler().sent(found - self._let_go)
                self._let_go |= found
                self.tick()
            if len(found) == len(names) or time.monotonic() > end:
                return found
            time.sleep(_POLL_SECONDS)

    # -- D -----------------------------------------------------------------

    def notify(self, engine_id: str, messages: Sequence[bytes]) -> None:
        """Sends a P that it knows whatever is given, through NIXL."""
        worker = self._inner_workers()[0]
        name = next(iter(worker._remote_agents[engine_id].values()))
        for message in messages:
            worker.nixl_wrapper.send_notif(name, notif_msg=message)

    def ask_spoilt(self, asks: Sequence[Ask], how: str, reads: int) -> int:
        """As `ask`, of a load that goes wrong once so many reads of it are over.

        Args:
            how: ``flip``, ``swap`` or ``layer``.
        """
        name, fault = asks[0].prompt.name, digest_faults.FAULTS[how]
        self.digests.after_reads(reads, lambda: fault(self, self._by_name[name]))
        return self.ask(asks)

    def _inner_workers(self) -> list[Any]:
        return [release.nixl_of(worker).connector_worker for worker in self.workers]

    def ask(self, asks: Sequence[Ask]) -> int:
        """Schedules prompts that P has computed, and takes the step that posts the reads."""
        if not self.before:
            self.before = self._held()
        tokens = sum(self._schedule(ask).external_tokens for ask in asks)
        self._step()
        return tokens

    def _schedule(self, ask: Ask) -> Tracked:
        prompt = ask.prompt
        tracked = self.scheduler.decode(
            prompt.number, prompt.name, prompt.tokens, 0, json.loads(ask.answer)
        )
        self.tracked.append(tracked)
        self._map(tracked)
        self._by_name[prompt.name] = tracked
        return tracked

    def timed(self, ask: Ask, seconds: float) -> Timed:
        """Reads one prompt from a P that is known; its pages are there before the clock runs."""
        name = ask.prompt.name
        self._schedule(ask)
        descriptors, started = self.descriptors, time.perf_counter()
        while True:
            self._step()
            seen = self._look([name])
            passed = time.perf_counter() - started
            if name in seen.received:
                return Timed(passed, self.descriptors - descriptors)
            if seen.failed or passed > seconds:
                raise LoadFailed(f"{name} was not read: {seen}")
            time.sleep(_TIMED_POLL_SECONDS)

    def refuse(self, ask: Ask) -> None:
        """Ends a prompt that was never scheduled: its client left while it queued."""
        from vllm.v1.request import RequestStatus

        prompt = ask.prompt
        params = json.loads(ask.answer)
        request = self._plain_scheduler()._request(
            prompt.number, prompt.name, prompt.tokens, params
        )
        request.status = RequestStatus.FINISHED_ABORTED
        self.scheduler.connector.request_finished(request, [])
        self._step()

    def watch(self, names: Sequence[str], seconds: float) -> Seen:
        """Steps until each of `names` is received or failed, or the time is over."""
        end = time.monotonic() + seconds
        while True:
            seen = self._look(names)
            if not seen.waiting:
                return seen
            if time.monotonic() > end:
                # Who only looks at once changes nothing by it.
                found = standstill(self._inner_workers()) if seconds else ""
                return replace(seen, standstill=found)
            time.sleep(_POLL_SECONDS)
            self._step()

    def idle(self, steps: int, counts: bool = False) -> float:  # noqa: FBT001, FBT002
        """Seconds of a processor that one of so many steps takes, with nothing to do.

        The least of some at a time: what else runs only makes a step longer.

        Args:
            counts: whether both halves are asked what they have counted, as vLLM does (from 0.24).
        """
        found = []
        for start in range(0, steps, _IDLE_AT_ONCE):
            some = min(_IDLE_AT_ONCE, steps - start)
            started = time.thread_time()
            for _ in range(some):
                self._step()
                self._finished()
                if counts:
                    self._counted()
            found.append((time.thread_time() - started) / some)
        return min(found)

    def _counted(self) -> None:
        for worker in self.workers:
            worker.get_kv_connector_stats()
        assert isinstance(self.scheduler, CoreScheduler)
        self.scheduler.connector.get_kv_connector_stats()

    def _look(self, names: Sequence[str]) -> Seen:
        _, received, broken = self._finished()
        for rank, done in enumerate(received):
            self._received[rank] |= done
        self._broken |= set(broken)
        done = set.intersection(*self._received)
        failed = {name for name in names if self._broken & self._parts(name)}
        return Seen(
            received=frozenset(done & set(names) - failed),
            failed=frozenset(failed),
            waiting=frozenset(set(names) - done - failed),
            logged=tuple(self.log.errors),
        )

    def wait_before(self, seconds: float) -> None:
        """Has the requests that D is given from now on have waited for so long before."""
        WAITED.seconds = seconds

    def end_leases(self) -> None:
        """Has P's leases of all that is being read have run out."""
        from kvpatch.transfer.lease import Lease

        for worker in self._inner_workers():
            for reads in worker._recving_transfers.values():
                for read in reads:
                    getattr(read, "_read", read).lifetime.lease = Lease(0.0)

    def beaten(self) -> int:
        """To how many ranks of peers the first worker knows that heartbeats have gone."""
        loads = _held(self._inner_workers()[0], Loads)
        assert loads is not None
        return sum(beats._run[1] > 0 for beats in loads.leases._heartbeats.values())

    def _parts(self, name: str) -> set[str]:
        """What the release may say is broken: a request, or some of its blocks."""
        return {f"request {name}"} | {f"block {b}" for b in self._by_name[name].tables[0]}

    def abort(self, name: str) -> None:
        """Ends a request as the scheduler does when its client is gone."""
        self._end(name)
        self._step()

    def _end(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        tracked = self._by_name[name]
        tracked.request.status = RequestStatus.FINISHED_ABORTED
        self.scheduler.connector.request_finished(tracked.request, tracked.tables[0])

    def give_up(self, name: str) -> None:
        """Aborts a request and tells the workers, as every step of vLLM's does."""
        self.abort(name)
        self.over = {name}
        received = self._finished()[1]
        for rank, done in enumerate(received):
            self._received[rank] |= done

    def retry(self, ask: Ask) -> int:
        """Ends a request as `give_up` does; the same step begins another one of its name."""
        self._end(ask.prompt.name)
        self.over = {ask.prompt.name}
        for done in self._received:  # of the one before it
            done.discard(ask.prompt.name)
        return self.ask([ask])

    # -- D with the release's own scheduler -----------------------------------

    def offer(self, texts: Sequence[str], tokens: int) -> list[str]:
        """What the scheduler makes of prompts with these parameters, one after the other.

        Each is taken, scheduled and sent to the workers; then its client is gone.
        """
        found = []
        for text in texts:
            self._offered.append(text)
            name = f"offered-{len(self._offered)}"
            core = self._core_scheduler()
            # Others than a stage's prompts have, by a hundred, which would be their prefixes.
            number = 10 + len(self._offered) % 90
            tracked = core.receive(number, name, tokens, json.loads(text))
            self._by_name[name] = tracked
            self.tick()
            found.append(core.status(name))
            if found[-1] == "WAITING_FOR_REMOTE_KVS":
                tracked.tables = core._tables(name)
                self._map(tracked)
                self.hang_up(name)
                self.watch([name], _OVER_SECONDS)
                self.loaded([name])
            core.forget()
        return found

    def save_to_own_buffer(self) -> None:
        """Has the scheduler save prompts to the release's own host buffer, of which it knows all.

        Fake: there is no buffer, and no worker that would fill it.
        """
        release.nixl_of(self.scheduler.connector).connector_scheduler.use_host_buffer = True

    def last_offer(self) -> str:
        """The parameters that an error came with."""
        return self._offered[-1]

    def warned(self) -> list[str]:
        return self.log.warnings

    def hang_up(self, name: str) -> None:
        """Ends a request whose client is gone; the next step tells the workers."""
        core = self._core_scheduler()
        while core.is_ahead:
            self._step()
        self._look(())  # all steps so far are over: none of them tells of it
        core.abort(name)
        self.over = {name}

    def loaded(self, names: Sequence[str]) -> None:
        """Tells the scheduler that these have been received, or failed, and takes a step.

        As vLLM does when the last rank has reported them: the others may be reading still.
        """
        end = time.monotonic() + _REPORTED_SECONDS
        while not all(reported.issuperset(names) for reported in self.reported):
            assert time.monotonic() < end, f"a rank has not reported {names}: {self.reported}"
            self._look(())
            time.sleep(_POLL_SECONDS)
            self._step()
        self._hand_over(set(names))
        self.tick()

    def _hand_over(self, names: set[str]) -> None:
        core = self._core_scheduler()
        broken = [what.split(maxsplit=1) for what in self._broken]
        core.failed(
            {what for kind, what in broken if kind == "request"},
            {int(what) for kind, what in broken if kind == "block"}
            | {what for kind, what in broken if kind == "check"},
        )
        self._broken.clear()
        core.loaded(names)

    def serve(self, name: str, seconds: float) -> str:
        """Steps as an engine does, until a request waits for no load; what has become of it."""
        core = self._core_scheduler()
        end = time.monotonic() + seconds
        while core.status(name) == "WAITING_FOR_REMOTE_KVS" and time.monotonic() < end:
            _, received, broken = self._finished()
            self._broken |= set(broken)
            self.loaded(sorted(set.intersection(*received)))
            time.sleep(_POLL_SECONDS)
        return core.status(name)

    def receive(self, ask: Ask) -> str:
        """Takes a prompt of P's and a step; what has become of it."""
        self._take(ask)
        self.tick()
        return self._core_scheduler().status(ask.prompt.name)

    def _take(self, ask: Ask) -> None:
        """Takes a prompt; an answer of P that is empty is none."""
        core, prompt = self._core_scheduler(), ask.prompt
        core.edits[prompt.name] = prompt.edits
        params = json.loads(ask.answer) if ask.answer else None
        tracked = core.receive(prompt.number, prompt.name, prompt.tokens, params)
        core.note_windows(tracked, prompt.tokens - 1)  # D computes the last one again
        self._by_name[prompt.name] = tracked

    def is_told_of(self, name: str) -> bool:
        """Ends a request of D's whose client is gone; whether P is to be told of it."""
        self._core_scheduler().abort(name)
        scheduler = release.nixl_of(self.scheduler.connector).connector_scheduler
        return name in scheduler._reqs_need_recv

    def give_up_in_queue(self, ask: Ask) -> bool:
        """Takes a prompt whose client is gone before a step; whether P is to be told of it."""
        self._take(ask)
        return self.is_told_of(ask.prompt.name)

    def renewed_leases(self) -> list[str]:
        """Returns P's names of the requests whose leases D's heartbeats renew; from 0.22 on."""
        scheduler = release.nixl_of(self.scheduler.connector).connector_scheduler
        engines = scheduler._heartbeat_by_engine.values()
        return sorted(name for engine in engines for name in engine.req_ids)

    def complete(self, prompts: Sequence[Ask], seconds: float) -> list[Served]:
        """Steps as an engine does until prompts are answered that came together.

        An answer of P that is empty is none: the engine computes the prompt.
        """
        core, end = self._core_scheduler(), time.monotonic() + seconds
        names = [ask.prompt.name for ask in prompts]
        computed = dict.fromkeys(names, 0)
        handed: set[str] = set()
        for ask in prompts:
            self._take(ask)
        while time.monotonic() < end:
            for tracked, tokens in self._tick():
                computed[tracked.request.request_id] += len(tokens)
            if all(core.status(name).startswith("FINISHED") for name in names):
                break
            _, received, broken = self._finished()
            self._broken |= set(broken)
            # Ranks end in different steps: what each has reported by now, and nothing twice.
            ready = set.intersection(*self.reported).intersection(names) - handed
            handed |= ready
            self._hand_over(ready)
            time.sleep(_POLL_SECONDS)
        answers = core.answers()
        return [
            Served(core.status(name), computed[name], json.dumps(answers.get(name)))
            for name in names
        ]

    def compare(self, names: Sequence[str]) -> tuple[int, int]:
        """Wrong and total elements of these requests; of windows what the model will look at."""
        for device in self.on_device:
            device.pull()
        seen = self.spec.is_hybrid
        tracked = [self._by_name[name] for name in names]
        return compared(
            element
            for one in tracked
            for element in self._elements(one, range(one.tokens), seen=seen)
        )

    def strays(self) -> int:
        """Bytes written outside the blocks of all requests so far, aborted and failed too."""
        with self._still():
            return self._stray_bytes() if self.before else 0

    @contextmanager
    def _still(self) -> Iterator[None]:
        """While inside, no thread of a worker's places anything: memory is put back for a look."""
        with ExitStack() as held:
            for worker in self.workers:
                reader = _reader_of(release.nixl_of(worker).connector_worker)
                if reader is not None and reader.thread is not None:
                    held.enter_context(reader.thread.paused())
                    if reader.thread.copying is not None:  # what was handed over before
                        reader.thread.copying.settle()
            yield

    def written(self, name: str) -> int:
        """Bytes in a request's blocks that are not what was there before it asked."""
        blocks = self._by_name[name].tables[0]
        planes = [plane for c in self.caches for layer in c.layers for plane in layer.planes]
        with self._still():
            found = [plane[blocks] for plane in planes]
            with self._put_back():
                self._put(self.before)
                was = [plane[blocks] for plane in planes]
        return sum(int((a != b).sum()) for a, b in zip(found, was, strict=True))

    # -- what is left behind -------------------------------------------------

    def left(self) -> Left:
        """What the worker still holds of transfers; nothing of it once all are over.

        What failed keeps its space for a time, which is a short one here.
        """
        end = time.monotonic() + 4 * _QUARANTINE_SECONDS
        while True:
            with self._still():  # what a thread measures is over within one step of its own
                if not self._has_lost() or time.monotonic() > end:
                    return self._left()
            time.sleep(_POLL_SECONDS)

    def _left(self) -> Left:
        transfers, metadata, handles, staging, reading = set(), set(), 0, 0, False
        for connector in self.workers:
            worker = release.nixl_of(connector).connector_worker
            transfers |= set(worker._recving_transfers)
            metadata |= set(getattr(worker, "_recving_metadata", ()))
            handles += _handles(worker.nixl_wrapper)
            reader = _reader_of(worker)
            if reader is not None:
                made = reader.heterogeneous
                staging += 0 if made is None else made.pool.taken_bytes
            loads = _held(worker, Loads)
            reading |= loads is not None and loads.context is not None
        return Left(frozenset(transfers), frozenset(metadata), handles, staging, reading)

    def _has_lost(self) -> bool:
        """Whether space is kept for transfers that were given up, once those are let go of that
        are over."""
        readers = [_reader_of(release.nixl_of(w).connector_worker) for w in self.workers]
        made = [reader.heterogeneous for reader in readers if reader and reader.heterogeneous]
        pools = [reads.pool for reads in made]
        for pool in pools:
            if pool.lost_bytes:
                pool.recover()
        return any(pool.lost_bytes for pool in pools)

    def has_reader(self) -> bool:
        """Whether kvpatch can read into a worker's cache."""
        return any(map(_reader_of, self._inner_workers()))

    def unlike_peers(self) -> set[str]:
        """The engines that kvpatch reads from in place of the release."""
        readers = [_reader_of(release.nixl_of(w).connector_worker) for w in self.workers]
        return {engine for reader in readers if reader for engine in reader.peers}

    def backend_shapes(self) -> dict[str, Any]:
        """What the release's backends are, by their names (backend_shapes.py)."""
        return dict(backend_shapes.shapes())

    def threads(self) -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    def age_peers(self) -> None:
        """Has the release think that it has not heard of its peers for long (from 0.24)."""
        for connector in self.workers:
            heard = release.nixl_of(connector).connector_worker._engine_last_active
            heard.update(dict.fromkeys(heard, -1e9))

    def sleep_and_wake(self) -> None:
        """Lets go of what is registered and registers it again, as sleep mode does (from 0.33)."""
        for worker in self.workers:
            worker.unregister_kv_caches()
        for worker in self.workers:
            worker.restore_kv_caches()
        self._share_handshake(self.scheduler.connector)

    def has_pool(self) -> bool:
        """Whether a worker has memory for its staging pool."""
        readers = map(_reader_of, self._inner_workers())
        return any(r.heterogeneous.pool.is_made for r in readers if r and r.heterogeneous)

    def tell(self, asks_scheduler: bool) -> tuple[Told, Told]:
        """What was counted since the last time, at a front end with kvpatch and at one without.

        Args:
            asks_scheduler: whether the release asks the scheduler by itself (from 0.24).
        """
        of_scheduler: list[Any] = []
        if isinstance(self.scheduler, CoreScheduler):
            of_scheduler, self.scheduler.told = self.scheduler.told, []
        elif asks_scheduler:
            of_scheduler.append(self.scheduler.connector.get_kv_connector_stats())
        with self._in_workers():
            sent = channel.payload_of(self.workers, of_scheduler)
        ours = channel.told(self.config, sent)
        if not self.spec.patched:
            return ours, ours
        kvpatch.disable()
        try:
            return ours, channel.told(self.config, sent)
        finally:
            kvpatch.enable()

    def _core_scheduler(self) -> CoreScheduler:
        if not isinstance(self.scheduler, CoreScheduler):
            raise TypeError("this engine's scheduler is the lab's")
        return self.scheduler

    def _plain_scheduler(self) -> Scheduler:
        if not isinstance(self.scheduler, Scheduler):
            raise TypeError("a player has one cache group")
        return self.scheduler


def _without_the_first(save: Any) -> Any:
    return lambda blocks, rows: save(blocks[1:], rows[1:])


def _in_the_next_row(save: Any) -> Any:
    return lambda blocks, rows: save(blocks, (*rows[1:], *rows[:1]))


def _handles(agent: Any) -> int:
    """How many of NIXL's transfer handles of an agent are not released."""
    bindings = agent.agent
    return sum(
        type(found).__name__ == "nixl_xfer_handle"
        and found._agent is bindings
        and not found._released
        for found in gc.get_objects()
    )


def _reader_of(worker: Any) -> Any:
    return _held(worker, Reader)


def _held(worker: Any, kind: type) -> Any:
    """kvpatch's object of a kind of a worker's; None where it is off."""
    try:
        from kvpatch.worker.state import worker_state
    except ImportError:
        return None
    return worker_state(worker).held(kind)
