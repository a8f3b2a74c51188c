"""The messages that a patched scheduler sends to workers that may be without kvpatch.

Workers get only those variables of a scheduler's environment that vLLM passes on. Ray's workers get
vLLM's own variables; headless nodes have those of their shells. A worker without kvpatch ignores
messages that it does not know, and reads as stock does. From 0.11.1 on the scheduler learns of
such a worker, and D computes the prompts that the worker may read wrongly. A message that the
worker must not ignore is one that it cannot unpickle.
"""

from __future__ import annotations

import sys
from typing import Any

from kvpatch.core.errors import PatchRefused
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.kv_cache_groups import counted_block_tokens, counted_group

CURE = (
    "set ENABLE_KVPATCH and the KVPATCH_* variables alike for every process of the engine (the "
    "shells of headless nodes; with Ray also "
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVPATCH_,ENABLE_KVPATCH), and restart it"
)


def is_applied(slug: str) -> bool:
    session = sys.modules.get("kvpatch.session")
    return session is not None and bool(session.SESSION.has_applied(slug))


def require(slug: str) -> None:
    """Refuses to unpickle such an object where this process has not applied that patch."""
    if not is_applied(slug):
        raise PatchRefused(
            f"kvpatch is on in this engine's scheduler and its patch {slug} is not in this "
            "worker, which would read wrong blocks",
            CURE,
        )


_TIMES_LARGER = (2, 4, 8, 16)
#: Prompts in a row; a proxy that makes prompts longer does not make them so many times as long.
_DOUBTS = 3


class EqualBlockPeers:
    """The peers of one scheduler whose blocks have turned out to be as large as its own.

    A stock worker reads those rightly, or refuses them itself. A prompt of one block tells
    nothing; one of more has as many blocks at P only where they are as large, or are not
    a part of D's, which the release refuses.
    """

    def __init__(self) -> None:
        #: False behind a prompt that says otherwise: P's may be another prompt, or was before.
        self._known: RecentEngines[bool] = RecentEngines()
        #: Prompts in a row whose lists a P of so many times larger blocks would have named too.
        self._larger: RecentEngines[dict[int, int]] = RecentEngines()

    def learn(self, engine_id: str, blocks: int, own_blocks: int) -> bool:
        """True if the peer is such a one.

        Args:
            blocks: that P names for a prompt.
            own_blocks: that the prompt would fill here.
        """
        if blocks != own_blocks:
            if engine_id in self._known:
                self._known[engine_id] = False
            return False
        if own_blocks > 1:
            self._known[engine_id] = True
        return self._known.get(engine_id, False)

    def knows(self, engine_id: str) -> bool:
        """True if the peer has turned out to be such a one by some prompt."""
        return engine_id in self._known

    def doubt(self, engine_id: str, blocks: int, tokens: int, block_tokens: int) -> bool:
        """Forgets a known peer that names too few blocks, several times, as one of larger blocks.

        A trimmed prompt may have as many blocks here as P's own has there.

        Args:
            tokens: of D's prompt.
            block_tokens: of D's blocks.
        """
        before = self._larger.get(engine_id, {})
        fit = (k for k in _TIMES_LARGER if -(-tokens // (k * block_tokens)) == blocks)
        found = self._larger[engine_id] = {k: before.get(k, 0) + 1 for k in fit}
        if max(found.values(), default=0) < _DOUBTS:
            return False
        del self._known[engine_id], self._larger[engine_id]
        return True


def is_guarded(
    scheduler: Any,
    equal_peers: EqualBlockPeers,
    engine_id: str,
    remote_tokens: int,
    remote_blocks: tuple[tuple[int, ...], ...],
    facts: ReleaseFacts,
) -> bool:
    """True if a worker without kvpatch may read a request wrongly that one with it would not."""
    number = counted_group(scheduler, facts)
    if number is None or number >= len(remote_blocks):
        return True
    tokens = counted_block_tokens(scheduler, facts)
    own = remote_tokens // tokens if facts.loads_whole_blocks_only else -(-remote_tokens // tokens)
    return not equal_peers.learn(engine_id, len(remote_blocks[number]), own)
