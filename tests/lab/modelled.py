"""An engine whose cache holds what a model computes, and nothing that a rule makes up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import release
from .compare import Array, slots
from .engine_api import Ask, Prompt
from .player import Player
from .scheduler import Tracked
from .tiny_model import Cached, Floats, TinyModel

_POLL_SECONDS = 0.0005
#: Of a fault that is a share of the context.
_PLACES = {"early": 0.15, "middle": 0.5, "late": 0.85}


class ModelledPlayer(Player):
    """What `Player` does, and the model's part in it where one is chosen."""

    _model: TinyModel | None = None

    def use_model(self, noise: float) -> None:
        """From now on what is cached is computed from what is cached."""
        spec = self.spec
        self._model = TinyModel(spec.layers, spec.kv_heads, spec.head_dim, noise=noise)

    def _write(self, tracked: Tracked, tokens: range) -> None:
        if self._model is None:
            super()._write(tracked, tokens)
        elif tokens:
            ids = tracked.request.all_token_ids[: tokens.stop]
            context = self._cached(tracked, range(tokens.start))
            self._store_cached(tracked, tokens, self._model.compute(ids, context, self._rounded))

    def _cached(self, tracked: Tracked, tokens: range) -> list[Cached]:
        """Of each layer what the cache holds of some tokens."""
        found = []
        for layer in range(self.spec.layers):
            block, offset = self._slots(tracked, tokens, layer)
            of_ranks = [caches.layers[layer].planes for caches in self.caches]
            keys, values = (
                np.concatenate([self._floats(rank[n][block, offset]) for rank in of_ranks], axis=1)
                for n in range(2)
            )
            found.append((keys, values))
        return found

    def _store_cached(self, tracked: Tracked, tokens: range, found: Sequence[Cached]) -> None:
        for layer, contents in enumerate(found):
            block, offset = self._slots(tracked, tokens, layer)
            for rank, caches in enumerate(self.caches):
                first = self.spec.first_head(rank)
                heads = slice(first, first + self.spec.heads_per_rank)
                for plane, content in zip(caches.layers[layer].planes, contents, strict=True):
                    plane[block, offset] = self._bits(content[:, heads])

    def _slots(self, tracked: Tracked, tokens: range, layer: int) -> tuple[Array, Array]:
        group = self.groups[layer]
        table = self.spec.kernel_blocks(tracked.tables[group], layer)
        return slots(table, tokens, self.block_tokens[group])

    def _floats(self, bits: Array) -> Floats:
        if self.spec.dtype == "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(bits).view(self.spec.dtype).astype(np.float32)

    def _bits(self, floats: Floats) -> Array:
        if self.spec.dtype == "bfloat16":
            whole = np.ascontiguousarray(floats).view(np.uint32)
            to_even = (whole >> 16) & 1
            return ((whole + 0x7FFF + to_even) >> 16).astype(np.uint16)
        kept = floats.astype(self.spec.dtype)
        return kept.view({4: np.uint32, 2: np.uint16}[self.spec.item_bytes])

    def _rounded(self, floats: Floats) -> Floats:
        return self._floats(self._bits(floats))

    # -- P -----------------------------------------------------------------

    def spoil(self, name: str, fault: str, where: str) -> None:
        """Has a prompt's blocks hold what they should not, before D reads them.

        Its last token's slot stays as it is, but for the fault that is of it.

        Args:
            where: early, middle or late in the prompt; or the first, the middle or the last layer.
        """
        (tracked,) = (t for t in self.tracked if t.request.request_id == name)
        tokens = range(tracked.tokens)
        found = self._cached(tracked, tokens)
        last = [(keys[-1].copy(), values[-1].copy()) for keys, values in found]
        layers = {"first": 0, "middle": len(found) // 2, "last": len(found) - 1}
        at = self._block_at(where, len(tokens)) if where in _PLACES else slice(0)
        spoilt = _spoilt(found, fault, at, layers.get(where, 0), self._of_another(tracked))
        for (keys, values), (key, value) in zip(spoilt, last, strict=True):
            if fault != "another last token":
                keys[-1], values[-1] = key, value
        self._store_cached(tracked, tokens, spoilt)

    def _block_at(self, where: str, tokens: int) -> slice:
        size = self.spec.block_tokens
        first = int(_PLACES[where] * (tokens // size)) * size
        return slice(first, first + size)

    def _of_another(self, tracked: Tracked) -> list[Cached]:
        """What another prompt of as many tokens has."""
        assert self._model is not None
        none = np.zeros((0, self.spec.kv_heads, self.spec.head_dim), np.float32)
        ids = [1 + (7 * i * i + 3) % 100 for i in range(tracked.tokens)]
        return self._model.compute(ids, [(none, none)] * self.spec.layers, self._rounded)

    # -- D -----------------------------------------------------------------

    def live(self, asks: Sequence[Ask], seconds: float) -> dict[str, str]:
        """Serves prompts to their ends, as an engine does; what has become of each."""
        core, names = self._core_scheduler(), [ask.prompt.name for ask in asks]
        for ask in asks:
            prompt = ask.prompt
            self._by_name[prompt.name] = core.receive(
                prompt.number, prompt.name, prompt.tokens, json.loads(ask.answer)
            )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = {name: core.status(name) for name in names}
            if all(status.startswith("FINISHED") for status in found.values()):
                self._turn()  # in which the workers hear of it
                return found
            self._turn()
            time.sleep(_POLL_SECONDS)
        return {name: core.status(name) for name in names}

    def go_on(self, seconds: float) -> None:
        """Some steps without requests: of a load that nobody waits for P has still to hear."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._turn()
            time.sleep(_POLL_SECONDS)

    def _turn(self) -> None:
        """A step of the engine: what the workers report is of this very step."""
        core = self._core_scheduler()
        computation = core.compute()
        if computation is None:
            self._step()
        else:
            self._send(computation.metadata, computation.computed)
        _, received, broken = self._finished()
        for rank, done in enumerate(received):
            self._received[rank] |= done
        done = set.intersection(*self._received)
        for rank in self._received:
            rank -= done
        core.loaded(done)
        failed = [what.split(maxsplit=1) for what in broken]
        core.failed(
            {what for kind, what in failed if kind == "request"},
            {int(what) for kind, what in failed if kind == "block"},
        )
        if computation is not None:
            core.computed(computation)

    def farthest_from_right(self, prompt: Prompt) -> float:
        """How far what a request's blocks hold is from what the model computes, at the most."""
        assert self._model is not None
        tracked = self._by_name[prompt.name]
        none = np.zeros((0, self.spec.kv_heads, self.spec.head_dim), np.float32)
        ids = list(tracked.request.prompt_token_ids)
        right = self._model.compute(ids, [(none, none)] * self.spec.layers, self._rounded)
        held = self._cached(tracked, range(len(ids)))
        return max(
            float(np.abs(a - b).max())
            for one, other in zip(right, held, strict=True)
            for a, b in zip(one, other, strict=True)
        )

    def witness(self) -> dict[str, Any] | None:
        """What the first rank's witness has seen; None where it has none."""
        from kvpatch.connector.state import worker_state
        from kvpatch.connector.witness.witness import Witness

        worker = release.nixl_of(self.workers[0]).connector_worker
        witness = worker_state(worker).held(Witness)
        if witness is None:
            return None
        counts = witness.counts
        return {
            "witnessed": counts.witnessed,
            "learnt": counts.learnt,
            "alarms": counts.alarms,
            "enforced": counts.enforced,
            "not_witnessed": dict(counts.not_witnessed),
            "latest": [tuple(alarm) for alarm in counts.latest],
        }


def _spoilt(
    found: Sequence[Cached], fault: str, at: slice, layer: int, other: Sequence[Cached]
) -> list[Cached]:
    """What is cached once a fault has come over it."""
    spoilt = [(keys.copy(), values.copy()) for keys, values in found]
    keys, values = spoilt[layer]
    if fault == "all stale" or fault == "another last token":
        return (
            [(k.copy(), v.copy()) for k, v in other]
            if fault == "all stale"
            else _last_of(spoilt, other)
        )
    if fault == "stale block":
        for (k, v), (other_k, other_v) in zip(spoilt, other, strict=True):
            k[at], v[at] = other_k[at], other_v[at]
    elif fault == "zeroed block":
        for k, v in spoilt:
            k[at], v[at] = 0, 0
    elif fault == "heads swapped":
        keys[:], values[:] = keys[:, ::-1].copy(), values[:, ::-1].copy()
    elif fault == "zeros":
        keys[:], values[:] = 0, 0
    elif fault == "values doubled":
        values *= 2
    elif fault == "all of a layer stale":
        keys[:], values[:] = other[layer]
    elif fault == "token lost":
        half = len(keys) // 2
        for one in (array for pair in spoilt for array in pair):
            one[half : half + 1] = one[half + 1 : half + 2].copy()
    elif fault == "key flipped":
        keys[len(keys) // 2] *= -1
    else:
        raise ValueError(fault)
    return spoilt


def _last_of(spoilt: list[Cached], other: Sequence[Cached]) -> list[Cached]:
    for (k, v), (other_k, other_v) in zip(spoilt, other, strict=True):
        k[-1], v[-1] = other_k[-1], other_v[-1]
    return spoilt
