"""Random requests between the schedulers of a P and a D, whose workers are simulated.

Schedulers, block managers and prefix caches are the release's own, beneath kvpatch. Instead
of keys and values a slot of a block holds the mark of the token that was written there last, behind
those before it. A load moves marks as its `ReadRequest` has workers move bytes. All that a computed
token looks at must have the marks of its own request. In the end no request may wait, and no block
be taken. There are no clocks: a seed plays the same everywhere.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from kvpatch.checks.grants import GrantedHolds
from kvpatch.core.releases import ReleaseFacts
from kvpatch.load.read_request import DIGEST, HOLD, ReadRequest, groups, read_request_of
from kvpatch.load.token_pairing import filled_state, state_block
from kvpatch.worker.state import scheduler_state

from . import release, standins
from .block_store import STATE, BlockStore
from .case import EngineSpec
from .core import CoreScheduler
from .release import accepted
from .scheduler import TO_BE_READ, Computation, Tracked, new_request

_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 40, 64, 90, 100)
_MOST_TOKENS, _MOST_REQUESTS, _MOST_RUNNING = 150, 33, 6
#: In which requests come, and until all of them must be over.
_STEPS, _LAST_STEPS = 200, 1500
#: D's leases of answered turns end after so many of the last steps.
_LEASE_STEPS = 300
#: A token that no model answers with.
_EDIT = 97


class Wrong(Exception):
    """A token looks at what is not its request's own, or something is left in the end."""


@dataclass(frozen=True)
class Play:
    """Two engines, and what happens to their requests.

    Attributes:
        fails: True if loads fail, some of them in a check.
        has_turns: True if P reads back what D has answered.
    """

    prefill: EngineSpec
    decode: EngineSpec
    fails: bool = False
    has_turns: bool = False


class Text:
    """The tokens of a request, its answer included, and their marks."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self.marks: list[int] = []
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.marks.append(hash((*self.marks[-1:], token)))

    def grown(self, tokens: int) -> Text:
        """Adds what the model answers: always the same token behind a text."""
        while len(self.tokens) < tokens:
            self._append(3 + self.marks[-1] % 90)
        return self


class SimulatedEngine(CoreScheduler):
    """A scheduler of the release, and a worker that knows which token each slot has."""

    def __init__(self, name: str, spec: EngineSpec, seed: int, *, reads_back: bool) -> None:
        from vllm.config import set_current_vllm_config

        release.use_layout(release.layout_name(spec))
        standins.set_device_type("cpu")
        more = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0} if reads_back else {}
        config = release.vllm_config(spec, name, "kv_both", more)
        config.scheduler_config.max_num_seqs = _MOST_RUNNING
        plan = release.kv_cache_config(spec, config)
        with set_current_vllm_config(config):
            super().__init__(config, plan, spec, seed)
        self.name = name
        self.peer_cuts_finer = False
        specs = [group.kv_cache_spec for group in plan.kv_cache_groups]
        self._windows = [getattr(one, "sliding_window", None) or 0 for one in specs]
        self._are_states = [type(one).__name__ == "MambaSpec" for one in specs]
        self._texts: dict[str, Text] = {}
        #: By block and slot, the mark of what is there.
        self._marks: dict[tuple[int, int], int | None] = {}
        self.store = BlockStore() if spec.stores_blocks else None
        #: Steps that are computed, and of which the scheduler has not heard.
        self._under_way: list[Computation] = []
        #: Loads under way, by their request, and requests that need nothing of the peer's.
        self.loads: list[tuple[str, Any]] = []
        self.unneeded: list[str] = []
        #: Requests whose blocks are kept for a peer, and those that the scheduler is to let go of.
        self.kept: list[str] = []
        self._let_go: list[str] = []
        #: Requests of which the peer has said so before this scheduler says that it keeps them.
        self._early: set[str] = set()
        self._all_blocks = self.free_blocks()
        scheduler = release.nixl_of(self.connector).connector_scheduler
        self.facts: ReleaseFacts = scheduler_state(scheduler).facts
        # As after a handshake with workers that have such tables.
        scheduler_state(scheduler).of(GrantedHolds)._tables = {HOLD: (16,), DIGEST: ()}

    def take(self, name: str, prompt: list[int], params: dict[str, Any] | None, count: int) -> None:
        """Takes a request for an answer of so many tokens."""
        request = new_request(name, list(prompt), params, self._hasher, count)
        self._tracked[name] = Tracked(0, request, [], len(prompt))
        self._texts[name] = Text(prompt)
        self._core.add_request(request)

    def text(self, name: str) -> tuple[list[int], int]:
        """Returns the tokens of a request, with its answer, and the number of its prompt's."""
        request = self._tracked[name].request
        return list(request._all_token_ids), request.num_prompt_tokens

    def live(self) -> list[str]:
        """Returns the requests that are not over."""
        return [n for n, one in self._tracked.items() if not one.request.is_finished()]

    def answer(self, name: str) -> dict[str, Any] | None:
        """Returns what a request that is over was answered with, as a proxy has it."""
        found: dict[str, Any] | None = json.loads(json.dumps(self._answers.get(name)))
        return found

    def reset(self) -> None:
        """Preempts all that runs and empties the prefix cache, where the release can do so."""
        wanted = accepted(self._core.reset_prefix_cache, {"reset_running_requests": True})
        # While a load is under way its blocks stay, which the release calls a failure.
        with contextlib.suppress(RuntimeError):
            self._core.reset_prefix_cache(**wanted)

    def let_go(self, *names: str) -> None:
        """Takes note that the peer needs the blocks of requests no more."""
        for name in names:
            if name in self.kept:
                self.kept.remove(name)
                self._let_go.append(name)
            elif name not in self._let_go:
                self._early.add(name)

    def advance(self) -> int:
        """Takes a step; returns how many requests had something computed."""
        output = self._core.schedule()
        metadata = output.kv_connector_metadata
        if self.store is not None:
            metadata, of_store = metadata.metadata
            self.store.step(of_store, self._marks)
        for name, entry in metadata.reqs_to_recv.items():
            if any(map(any, groups(entry.local_block_ids))):
                self.loads.append((name, entry))
            else:
                self.unneeded.append(name)
        self.kept += metadata.reqs_to_send
        early = self._early.intersection(metadata.reqs_to_send)
        self._early -= early
        self.let_go(*early)
        computed = []
        for name, count in output.num_scheduled_tokens.items():
            tracked = self._tracked[name]
            end = tracked.request.num_computed_tokens
            tracked.tables = self._tables(name)
            self._compute(tracked, range(end - count, end))
            computed.append((tracked, range(end - count, end)))
        self._under_way.append(Computation(metadata, tuple(computed), output))
        if len(self._under_way) > int(self.spec.schedules_ahead):
            self.sent(set(self._let_go[:1]))
            del self._let_go[:1]
            self._update(self._under_way.pop(0))
        return len(computed)

    def _compute(self, tracked: Tracked, tokens: range) -> None:
        name, prompt = tracked.request.request_id, tracked.request.num_prompt_tokens
        marks = self._texts[name].grown(tokens.stop).marks
        for number, size in enumerate(self._block_tokens):
            table, window = tracked.tables[number], self._windows[number]
            for token in self._seen(number, tokens.start):
                block, slot = self._place(table, size, number, token)
                # docs/explanation/same_prompt.md: the last token looks at one that P lets go of.
                is_kept = "remote_num_tokens" in self.facts.answer and not self.peer_cuts_finer
                is_left = window and not is_kept
                if is_left and token == prompt - window == tokens.start - window + 1:
                    continue
                found = self._marks.get((block, slot)) if block else None
                if found != marks[token]:
                    raise Wrong(
                        f"{self.name}: token {tokens.start} of {name} looks at {token}, which is "
                        f"not in block {block} of group {number}: {table}"
                    )
        for number, size in enumerate(self._block_tokens):
            written = tokens[-1:] if self._are_states[number] else tokens
            for token in written:
                block, slot = self._place(tracked.tables[number], size, number, token)
                if block:
                    self._marks[block, slot] = marks[token]
                elif not self._windows[number]:
                    raise Wrong(f"{self.name}: token {token} of {name} has no slot")

    def _seen(self, number: int, token: int) -> range:
        """Returns the tokens in front of one that it looks at; of a state, the last one it has."""
        if self._are_states[number]:
            return range(max(0, token - 1), token)
        window = self._windows[number]
        return range(max(0, token - window + 1) if window else 0, token)

    def _place(self, table: list[int], size: int, number: int, token: int) -> tuple[int, int]:
        block = table[token // size] if token // size < len(table) else 0
        return block, STATE if self._are_states[number] else token % size

    def worker_metadata(self) -> Any:
        if self.store is None:
            return None
        received, self.store.received = self.store.received, set()
        self.loaded(received)
        return self.store.worker_metadata()

    def _answered(self, tracked: Tracked, place: int) -> list[int]:
        request = tracked.request
        if place < max(request.num_tokens, request.num_prompt_tokens):
            return []
        return [self._texts[request.request_id].grown(place + 1).tokens[place]]

    def fill(self, name: str, peer: SimulatedEngine, found: ReadRequest) -> None:
        """Loads a request's blocks from a peer's."""
        if found.tokens > found.remote_tokens:
            raise Wrong(f"{self.name}: {name} loads {found.tokens} of {found.remote_tokens} tokens")
        for number, size in enumerate(self._block_tokens):
            local, remote = found.local_blocks[number], found.remote_blocks[number]
            of_peer = peer._block_tokens[number]
            if not local:
                continue
            if self._are_states[number]:
                target = filled_state(local)
                source = state_block(remote, found.remote_tokens, of_peer)
                if target is None or source is None:
                    raise Wrong(f"{self.name}: {name} loads a state of {remote} into {local}")
                self._marks[target, STATE] = peer._marks.get((source, STATE))
                continue
            # Lists end with the last token; P's begins with the first one, but in a window.
            first = -(-found.tokens // size) - len(local)
            first_there = -(-found.remote_tokens // of_peer) - len(remote)
            first_there *= bool(self._windows[number])
            if first < 0:
                raise Wrong(f"{self.name}: {name} loads {found.tokens} tokens into {local}")
            for token in range(first * size, (first + len(local)) * size):
                target, place = local[token // size - first], token // of_peer - first_there
                is_held = token < found.tokens and 0 <= place < len(remote)
                source = remote[place] if is_held else -1
                if target:
                    self._marks[target, token % size] = peer._marks.get((source, token % of_peer))

    def fail(self, name: str, entry: Any, *, in_check: bool) -> None:
        """Tells the scheduler of a load that has failed, as the release's workers do."""
        blocks = {b for group in groups(entry.local_block_ids) for b in group if b}
        is_named = self.facts.failed_loads == "as failed"
        check = {name} if in_check else set()
        self.failed({name} if is_named else set(), check if is_named else blocks | check)

    def assert_over(self) -> None:
        if self.live():
            waiting = {name: self.status(name) for name in self.live()}
            raise Wrong(f"{self.name}: {waiting} after {_LAST_STEPS} steps")
        if self.free_blocks() != self._all_blocks:
            raise Wrong(f"{self.name}: {self._all_blocks - self.free_blocks()} blocks are not free")


class Traffic:
    """The clients, the proxy, and all else that happens to a P and a D."""

    def __init__(self, play: Play, seed: int) -> None:
        self._random = random.Random(seed)
        self._play, both = play, play.has_turns
        self.prefill = SimulatedEngine("P", play.prefill, seed, reads_back=both)
        self.decode = SimulatedEngine("D", play.decode, seed + 1, reads_back=both)
        self.decode.peer_cuts_finer = play.prefill.block_tokens < play.decode.block_tokens
        self._is_open = True
        self._asked = 0
        self._prompts: list[list[int]] = []
        #: Prompts that P has not answered, by request.
        self._at_p: dict[str, list[int]] = {}
        #: Requests that D gets in so many steps, as their name, prompt and P's answer.
        self._coming: list[tuple[int, tuple[str, list[int], dict[str, Any]]]] = []
        #: By request, the peer's with the blocks that it loads.
        self._source: dict[str, str] = {}
        #: D's requests of which a next turn has been thought.
        self._turned: set[str] = set()
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        for _ in range(_STEPS):
            self._step()
        self._is_open = False
        for step in range(_LAST_STEPS):
            self._step()
            if step > _LEASE_STEPS:
                self.decode.let_go(*self.decode.kept)
            if not (self._at_p or self._coming or self.prefill.live() or self.decode.live()):
                break
        for _ in range(_MOST_REQUESTS):
            for engine in (self.prefill, self.decode):
                engine.let_go(*engine.kept)
                engine.advance()
        for engine in (self.decode, self.prefill):
            engine.assert_over()

    def _step(self) -> None:
        self._ask()
        self._forward()
        self._disturb(self.decode, 0.06, 0.03)
        if self._play.has_turns:
            self._turn()
            self._disturb(self.prefill, 0.04, 0.05)
        for engine, peer in ((self.decode, self.prefill), (self.prefill, self.decode)):
            self._load(engine, peer)
            self.seen["computed"] += engine.advance()
            peer.let_go(*(self._source[name] for name in engine.unneeded))
            engine.unneeded.clear()

    def _happens(self, share: float) -> bool:
        return self._random.random() < share

    def _may_ask(self) -> bool:
        may = self._is_open and self._asked < _MOST_REQUESTS
        self._asked += may
        return may

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randint(3, 90) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """Returns another prompt, or one that begins as an earlier one."""
        if self._prompts and self._happens(0.5):
            known = self._random.choice(self._prompts)
            found = known[: self._random.randint(1, len(known))]
            found = found + self._tokens(self._random.choice((0, 1, 5, 16, 20)))
        else:
            found = self._tokens(self._random.choice(_LENGTHS))
        self._prompts.append(found[:120])
        return self._prompts[-1]

    def _of_d(self, prompt: list[int]) -> list[int]:
        """Returns what D is sent of P's prompt: often the same, or longer, shorter or edited."""
        (kind,) = self._random.choices(("same", "longer", "shorter", "edited"), (50, 15, 15, 20))
        if kind == "longer":
            return prompt + self._tokens(self._random.choice((1, 2, 16, 20, 40)))
        if kind == "shorter":
            return prompt[: -self._random.choice((1, 2, 17))] or prompt
        return self._edited(prompt) if kind == "edited" else prompt

    def _of_p(self, prompt: list[int]) -> list[int]:
        """Returns what P can take of a prompt.

        <= 0.29 stock P ends as well where its prefix cache has a prompt and its state, but for the
        last token: P leaves that out only once it has looked.
        """
        spec, known = self._play.prefill, Version(self.prefill.facts.release)
        ends = known < Version("0.30") and spec.state_mode == "align"
        may_end = ends and len(prompt) > 1 and len(prompt) % spec.block_tokens == 1
        return prompt[:-1] if may_end else prompt

    def _edited(self, prompt: list[int]) -> list[int]:
        place = self._random.randrange(len(prompt))
        return [*prompt[:place], _EDIT, *prompt[place + 1 :]]

    def _ask(self) -> None:
        if len(self.decode.live()) < 8 and self._happens(0.35) and self._may_ask():
            name, prompt = f"p{self._asked}", self._of_p(self._prompt())
            count = 1 if self._happens(0.8) else self._random.randint(2, 5)
            self._at_p[name] = prompt
            self.prefill.take(name, prompt, dict(TO_BE_READ), count)
        if self._happens(0.1) and self._may_ask():
            self.decode.take(f"own{self._asked}", self._prompt(), None, self._random.randint(1, 6))

    def _forward(self) -> None:
        """Sends P's answers to D, some of them again or late."""
        live = self.prefill.live()
        for name in [name for name in self._at_p if name not in live]:
            prompt, answer = self._at_p.pop(name), self.prefill.answer(name)
            if answer is None:
                continue
            prompt = self._of_d(prompt)
            for number in range(self._random.choice((1, 1, 1, 2, 3))):
                late = self._random.randint(1, 60) if self._happens(0.25) else 0
                of_one = prompt if self._happens(0.9) else self._of_d(prompt)
                self._source[f"d-{name}-{number}"] = name
                self._coming.append((late, (f"d-{name}-{number}", of_one, dict(answer))))
        ready = [one for late, one in self._coming if not late]
        self._coming = [(late - 1, one) for late, one in self._coming if late]
        for name, prompt, answer in ready:
            self.decode.take(name, prompt, answer, self._random.choice((1, 1, 2, 3, 8, 20)))

    def _disturb(self, engine: SimulatedEngine, aborts: float, resets: float) -> None:
        if self._happens(aborts) and (live := engine.live()):
            engine.abort(self._random.choice(live))
            self.seen["aborted"] += 1
        if self._happens(resets):
            engine.reset()

    def _load(self, engine: SimulatedEngine, peer: SimulatedEngine) -> None:
        """Ends one of the loads that are under way."""
        if not (engine.loads and self._happens(0.5)):
            return
        name, entry = engine.loads.pop(self._random.randrange(len(engine.loads)))
        source, found = self._source[name], read_request_of(entry)
        how = (
            self._random.choices(("transfer", "check", ""), (1, 1, 8))[0]
            if self._play.fails
            else ""
        )
        if source not in peer.kept:  # its hold is withdrawn
            how = "check"
        if how:
            engine.fail(name, entry, in_check=how == "check")
        else:
            assert found is not None
            engine.fill(name, peer, found)
            peer.let_go(source)
        engine.loaded({name})
        self.seen[how or "loaded"] += 1

    def _turn(self) -> None:
        """Has clients go on from what D has answered, or leave it until its lease ends."""
        live = self.decode.live()
        for name in [n for n in self._source if n.startswith("d-") and n not in self._turned]:
            if name in live or not (answer := self.decode.answer(name)):
                continue
            self._turned.add(name)
            if self._happens(0.7) and self._may_ask():
                tokens, prompt_tokens = self.decode.text(name)
                kind = self._random.choices(("kept", "stripped", "edited"), (60, 30, 10))[0]
                tokens = tokens[:prompt_tokens] if kind == "stripped" else tokens
                tokens = self._edited(tokens) if kind == "edited" else tokens
                tokens += self._tokens(self._random.choice((0, 1, 3, 16, 30)))
                for number in range(self._random.choice((1, 1, 1, 2))):
                    turn = f"p{self._asked}-{number}"
                    self._source[turn] = name
                    self._at_p[turn] = self._of_p(tokens[:_MOST_TOKENS])
                    self.prefill.take(turn, self._at_p[turn], dict(answer), 1)
            elif self._happens(0.5):
                self.decode.let_go(name)


def play_at_random(play: Play, seed: int) -> Counter[str]:
    """Plays a seed in this process; returns how often what has happened.

    Raises:
        Wrong: something was not as it has to be.
    """
    traffic = Traffic(play, seed)
    traffic.run()
    return traffic.seen


def play_store(play: Play, tokens: int) -> Counter[str]:
    """Plays a prompt of P's, and at D, whose prefix cache is empty again, all that begin so.

    D has the blocks of a longer one in the store. Raises and returns as ``play_at_random``.
    """
    traffic = Traffic(play, 1)
    prefill, decode, prompt = traffic.prefill, traffic.decode, [*range(3, 3 + tokens)]
    prefill.take("p", prompt, dict(TO_BE_READ), 1)
    while prefill.live():
        prefill.advance()
    decode.take("d", prompt, prefill.answer("p"), 1)
    for count in range(tokens, 0, -1):
        while decode.live():
            decode.advance()
            for name, entry in decode.loads:
                decode.fill(name, prefill, read_request_of(entry))
                decode.loaded({name})
                traffic.seen["loaded"] += 1
            decode.loads.clear()
        decode.forget()
        decode.take(f"own{count}", prompt[:count], None, 1)
    traffic.seen["copied back"] = 0 if decode.store is None else decode.store.copied_back
    return traffic.seen
