"""A cache's content as digests that depend on neither layout, block size nor tensor parallelism.

A *head digest* is the SHA-256 of one KV head's content of one layer: the bytes of its tokens in
order, each token's channels in order. A *layer fingerprint* is the SHA-256 over the head digests of
a layer, keys before values, heads in their global order. Two steps rather than one, because under
tensor parallelism no process holds all heads of a layer: each rank reports the heads it has, and
joining them gives the same fingerprint as one process with all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvpatch.core.errors import IncompleteCache

HeadDigests = Mapping[str, str]
"""``"<content>/<global head>"`` -> hexadecimal SHA-256, of one layer."""

LayerFingerprints = dict[str, str]
"""Layer name -> hexadecimal SHA-256."""

STATE = "state"
"""What recurrent states are called among the contents."""

_CONTENT_ORDER = ("key", "value", "latent", STATE)


def head_key(content: str, head: int) -> str:
    """The key of one head in :data:`HeadDigests`."""
    return f"{content}/{head}"


def digest_heads(content: str, first_head: int, rows: npt.NDArray[np.uint8]) -> dict[str, str]:
    """Digest each head of ``rows``, raw bytes of shape [token, head, channel bytes].

    ``first_head`` is the global number of head 0.
    """
    if rows.ndim != 3:
        raise ValueError(f"rows must be [token, head, channel bytes], found shape {rows.shape}")
    return {
        head_key(content, first_head + head): hashlib.sha256(
            np.ascontiguousarray(rows[:, head]).tobytes()
        ).hexdigest()
        for head in range(rows.shape[1])
    }


def layer_fingerprint(layer: str, heads: HeadDigests) -> str:
    """Join head digests into a layer's fingerprint.

    Raises:
        IncompleteCache: nothing to join, an unknown content, or a gap in the heads.
    """
    by_content: dict[str, list[int]] = {}
    for key in heads:
        content, _, number = key.partition("/")
        by_content.setdefault(content, []).append(int(number))
    unknown = sorted(set(by_content) - set(_CONTENT_ORDER))
    if unknown or not by_content:
        raise IncompleteCache(
            f"{layer}: expected contents out of {_CONTENT_ORDER}, found {sorted(by_content)}"
        )
    joined = hashlib.sha256()
    for content in _CONTENT_ORDER:
        found = sorted(by_content.get(content, []))
        if found != list(range(len(found))):
            raise IncompleteCache(
                f"{layer}: expected {content} heads 0..{found[-1]}, found {found}"
            )
        for head in found:
            joined.update(bytes.fromhex(heads[head_key(content, head)]))
    return joined.hexdigest()


def join_ranks(ranks: Sequence[Mapping[str, HeadDigests]]) -> LayerFingerprints:
    """The fingerprint of every layer from the reports of all ranks (layer -> head digests).

    Ranks may hold different layers (pipeline parallelism), different heads (tensor parallelism) or
    copies of a head (more ranks than heads); copies must agree. Ranks have copies of a
    state's parts too, of which stock makes some that do not (vLLM #55208): such a layer is like no
    other.

    Raises:
        IncompleteCache: no layer at all, a head missing, or copies of a head that differ.
    """
    layers: dict[str, dict[str, str]] = {}
    for rank, report in enumerate(ranks):
        for layer, heads in report.items():
            joined = layers.setdefault(layer, {})
            for key, digest in heads.items():
                known = joined.setdefault(key, digest)
                if known == digest:
                    continue
                if not key.startswith(f"{STATE}/"):
                    raise IncompleteCache(
                        f"{layer}: rank {rank} holds another copy of {key} than the ranks before it"
                    )
                joined[key] = hashlib.sha256(bytes.fromhex(known + digest)).hexdigest()
    if not layers:
        raise IncompleteCache("no rank reported a layer")
    return {layer: layer_fingerprint(layer, heads) for layer, heads in layers.items()}


def differing_layers(left: LayerFingerprints, right: LayerFingerprints) -> list[str]:
    """Layers whose fingerprints differ or that only one side has, in the order of ``left``."""
    names: Iterable[str] = dict.fromkeys([*left, *right])
    return [name for name in names if left.get(name) != right.get(name)]
