"""The worker's own compatibility hash, which says how another one differs when it is compared.

The release compares the two in the thread of the handshake, before it decodes anything else of
the peer, and raises where they are not equal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.observe.book import Book
from kvpatch.peer import peer_hash
from kvpatch.peer.peer_hash import Explanation, OwnFactors
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_LOG = logging.getLogger("kvpatch.named_factors")
#: The hashes that are remembered: of more peers than a fleet has kinds of.
_MOST_HASHES = 256
#: Characters; of others nothing is kept.
_HASH_LENGTH = 64


@dataclass(eq=False)
class NamedPeers:
    """The accepted peers of a worker's handshakes, which have threads of their own, one each."""

    _accepted: dict[int, Explanation] = field(default_factory=dict)

    def accept(self, named: Explanation | None) -> None:
        """Keeps how the peer of this thread's handshake differs; None where it has our hash."""
        if named is None:
            self._accepted.pop(threading.get_ident(), None)
        else:
            self._accepted[threading.get_ident()] = named

    def accepted(self) -> Explanation | None:
        """Returns how the peer of this thread's handshake differs; None if it has our hash."""
        return self._accepted.get(threading.get_ident())


class ComparedHash(str):
    """A hash that a peer's is compared with: one that is accepted counts as equal."""

    _own: OwnFactors
    _explain: Callable[[str], Explanation | None]
    _peers: NamedPeers
    _book: Book
    _checks: bool

    __slots__ = ("_book", "_checks", "_explain", "_own", "_peers")

    @classmethod
    def of(cls, own: OwnFactors, peers: NamedPeers, book: Book, *, checks: bool) -> ComparedHash:
        """Makes this engine's; `checks` is True if what is accepted is checked here."""
        made = cls(own.digest)
        # A peer that is refused is asked again by each of its requests.
        made._explain = lru_cache(_MOST_HASHES)(partial(peer_hash.explain, own))
        made._own, made._peers, made._book, made._checks = own, peers, book, checks
        return made

    def __eq__(self, other: object) -> bool:
        """Raises:
        PeerRefused: the other is a peer's, and its engine differs in what is not accepted.
        """
        if not isinstance(other, str):
            return False
        self._peers.accept(None)
        if not str.__eq__(self, other):
            with self._book.refusals():
                self._peers.accept(self._judged(str(other)))
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def _judged(self, stated: str) -> Explanation:
        named = self._explain(stated) if len(stated) == _HASH_LENGTH else None
        if named is None:
            raise peer_hash.unexplained(self._own)
        accepted = settings.accepted_factors()
        if not set(named.factors) <= set(accepted):
            raise peer_hash.not_accepted(named, accepted)
        if not self._checks:
            raise PeerRefused(
                f"{settings.ACCEPT} accepts what unlike_engines checks, which KVPATCH_DISABLE "
                "turns off",
                "leave it on",
            )
        return named


def compare_by_factor(release: ReleaseWorker, *, checks: bool) -> bool:
    """Makes a registered worker explain how a peer's hash differs; the hash it sends stays.

    Returns False where its own hash is made of something that is not known here.
    """
    own = own_factors(release)
    if own is None:
        _LOG.warning(
            "this engine's compatibility hash is made of something that kvpatch does not know: how "
            "peers differ is not said, and %s accepts nothing",
            settings.ACCEPT,
        )
        return False
    state = worker_state(release.worker)
    peers = state.of(NamedPeers)
    release.worker.compat_hash = ComparedHash.of(own, peers, state.book, checks=checks)
    return True


def own_factors(release: ReleaseWorker) -> OwnFactors | None:
    """Returns those of a registered worker; None where its hash is made of something else."""
    import vllm

    worker, facts = release.worker, release.facts
    config = worker.vllm_config
    model, cache = config.model_config, config.cache_config
    topology = getattr(worker, facts.topology) if facts.topology else None
    found: dict[str, Any] = {
        peer_hash.VERSION: vllm.__version__,
        peer_hash.CONNECTOR_VERSION: facts.connector_version,
        "model": model.model,
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        peer_hash.BACKEND: worker.backend_name,
        peer_hash.CACHE_DTYPE: str(cache.cache_dtype),
        peer_hash.CROSS_LAYERS: bool(getattr(topology, "cross_layers_blocks", False)),
        peer_hash.HYBRID: not config.scheduler_config.disable_hybrid_kv_cache_manager,
        peer_hash.MODE: "pull",  # of push mode nothing is named
    }
    if peer_hash.SPECULATION in facts.hash_factors or config.speculative_config is None:
        found[peer_hash.SPECULATION] = _speculation(config)
    own = OwnFactors(facts, found)
    try:
        is_known = own.digest == worker.compat_hash
    except TypeError:  # a value of a kind that no release puts into its hash
        return None
    return own if is_known else None


def _speculation(config: Any) -> dict[str, Any] | None:
    """The facts of drafting that count; nothing without a drafter that reads the model's states."""
    drafting = config.speculative_config
    if drafting is None or not drafting.use_eagle():
        return None
    draft = drafting.draft_model_config
    layers = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    found = {name: getattr(draft, name) for name in ("model", "revision", "code_revision")}
    return found | {
        "method": drafting.method,
        "parallel_drafting": drafting.parallel_drafting,
        "kv_cache_dtype": str(drafting.kv_cache_dtype or config.cache_config.cache_dtype),
        "auxiliary_layer_ids": None if layers is None else list(layers),
    }
