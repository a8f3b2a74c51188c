"""A language model that is small, and a real one: what it caches depends on all that it has cached.

Attention over the cached keys and values, rotary positions, an MLP, a residual stream; weights are
random. Numbers are rounded to the cache's type where they are cached, as engines do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
#: Keys and values of a layer, each [token, head, channel].
Cached = tuple[Floats, Floats]

_VOCABULARY = 128
_WIDTH = 64


@dataclass(frozen=True)
class TinyModel:
    """One, by its seed; engines of one seed have the same weights.

    Attributes:
        noise: relative, on what each layer adds: kernels of two engines differ by that.
    """

    layers: int
    heads: int
    channels: int
    seed: int = 0
    noise: float = 0.0

    def compute(
        self, tokens: Sequence[int], context: Sequence[Cached], rounded: Callable[[Floats], Floats]
    ) -> list[Cached]:
        """What each layer caches of the tokens behind those that are cached.

        Args:
            tokens: of the whole prompt so far.
            context: of each layer what is cached.
            rounded: to the cache's type and back.
        """
        start = len(context[0][0])
        places = np.arange(start, len(tokens))
        weights = np.random.default_rng(self.seed)
        drawn = _Drawn(weights)
        state = drawn((_VOCABULARY, _WIDTH), 1.0)[np.asarray(tokens[start:])]
        found = []
        for keys, values in context:
            seen = _normal(state)
            inner = self.heads * self.channels
            q, k, v = (
                (seen @ drawn((_WIDTH, inner))).reshape(-1, self.heads, self.channels)
                for _ in range(3)
            )
            k, v = rounded(_turned(k, places)), rounded(v)
            found.append((k, v))
            all_keys, all_values = np.concatenate([keys, k]), np.concatenate([values, v])
            attended = _attention(_turned(q, places), all_keys, all_values, places)
            state = state + self._noisy(attended.reshape(-1, inner) @ drawn((inner, _WIDTH)))
            hidden = np.maximum(_normal(state) @ drawn((_WIDTH, 2 * _WIDTH)), 0)
            state = state + self._noisy(hidden @ drawn((2 * _WIDTH, _WIDTH)))
        return found

    def _noisy(self, added: Floats) -> Floats:
        if not self.noise:
            return added
        drawn = np.random.default_rng().standard_normal(added.shape)
        return (added * (1 + self.noise * drawn)).astype(np.float32)


@dataclass
class _Drawn:
    weights: np.random.Generator

    def __call__(self, shape: tuple[int, int], scale: float = 0.0) -> Floats:
        found = self.weights.standard_normal(shape) * (scale or shape[0] ** -0.5)
        return found.astype(np.float32)


def _normal(state: Floats) -> Floats:
    return state / np.sqrt((state * state).mean(-1, keepdims=True) + 1e-6)


def _turned(found: Floats, places: npt.NDArray[np.int64]) -> Floats:
    """Rotary positions."""
    half = found.shape[-1] // 2
    angles = places[:, None, None] / 10000 ** (np.arange(half) / half)
    one, other = found[..., :half], found[..., half:]
    sine, cosine = np.sin(angles), np.cos(angles)
    turned = np.concatenate([one * cosine - other * sine, other * cosine + one * sine], -1)
    return turned.astype(np.float32)


def _attention(q: Floats, k: Floats, v: Floats, places: npt.NDArray[np.int64]) -> Floats:
    """[token, head, channel] of all that came before each token, and itself."""
    scores = np.einsum("thc,shc->hts", q, k) / np.sqrt(q.shape[-1])
    scores[:, np.arange(len(k))[None, :] > places[:, None]] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    weights = scores / scores.sum(-1, keepdims=True)
    return np.einsum("hts,shc->thc", weights, v).astype(np.float32)
