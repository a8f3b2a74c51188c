"""What P's kvpatch states beside all that its release does; and how D hears it.

A release's handshake has no word for how a CPU's keys lie, nor for the types of recurrent states or
the slots of a ring of keys. P's answer at its side channel is a map of names, of which each release
takes those that it knows: P's kvpatch adds some. D's release lets go of them, so that D's kvpatch
asks once more where it has to know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from kvpatch.connector.handshake.cpu_keys import word_of
from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.local.whole_blocks import contents_of
from kvpatch.connector.recent_engines import RecentEngines
from kvpatch.connector.state import worker_state
from kvpatch.connector.unlike_releases.side_channel import Address, ask, question_for
from kvpatch.connector.unpatched_workers import CURE
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: In P's answer: how a CPU's keys lie, and what is in blocks that are no rows of tokens.
KEYS, CONTENTS = "kvpatch_keys", "kvpatch_contents"
#: In P's answer: the layout of what it registers, where vLLM's own mirror would state another.
LAYOUT = "kvpatch_layout"
#: Of a worker's metadata, on its way to its scheduler; one without kvpatch has none.
_WORDS = "_kvpatch_words"

# --- the side that is read --------------------------------------------------------


def state_words(release: ReleaseWorker, metadata: Any) -> None:
    """Writes what no release says onto what a worker states, nothing where peers take no more."""
    words: dict[str, str | None] = {}
    if release.facts.encodes_metadata:
        order = release.key_order() if release.tiles_on_amx else None
        # D cannot tell kvpatch's host buffer from a mirror.
        is_buffered = worker_state(release.worker).is_host_buffered
        words = {
            KEYS: None if order is None else word_of(order),
            CONTENTS: contents_of(release),
            LAYOUT: release.memory_layout if is_buffered or release.is_where_mirrors_are else None,
        }
    setattr(metadata, _WORDS, {name: word for name, word in words.items() if word is not None})


def lack_kvpatch(metadata: Mapping[Any, Any]) -> bool:
    """True if a worker has written nothing there, with an error in the log."""
    found = not all(_WORDS in vars(stated) for stated in metadata.values())
    if found:
        _LOG.error(
            "kvpatch is on in this engine's scheduler and not in all of its workers: prompts that "
            "they may read wrongly are computed. To have these loaded, %s",
            CURE,
        )
    return found


def with_stated_words(metadata: Mapping[Any, Any]) -> dict[Any, Any]:
    """What workers state, as their scheduler encodes it for peers: with some names more."""
    return {rank: _with_words(stated) for rank, stated in metadata.items()}


def _with_words(stated: Any) -> Any:
    words: dict[str, str] = vars(stated).get(_WORDS, {})  # a MultiConnector hands it to several
    if not words:
        return stated
    kind = type(stated)
    more = [(name, str, field(default="")) for name in words]
    with_fields = make_dataclass(kind.__name__, more, bases=(kind,))
    known = {one.name: getattr(stated, one.name) for one in fields(stated)}
    found = with_fields(**known, **words)
    # What other patches have written onto it, for their own parts of the scheduler.
    vars(found).update({n: v for n, v in vars(stated).items() if n not in known})
    return found


# --- the side that reads ----------------------------------------------------------


@dataclass(eq=False)
class SideChannels:
    """Where a worker's peers answer, by engine id."""

    found: RecentEngines[Address] = field(default_factory=RecentEngines)

    def words(self, engine_id: str, tp_rank: int, facts: ReleaseFacts) -> Mapping[str, object]:
        """All that a rank answers, by name; nothing where it does not answer, as a map."""
        import msgspec
        import zmq

        address = self.found.get(engine_id)
        if address is None or not facts.encodes_metadata:
            return {}
        try:
            payload, *_ = ask(address, question_for(facts.question, tp_rank))
            stated: Mapping[str, object] = msgspec.msgpack.decode(payload, type=dict[str, Any])
        except (PeerRefused, msgspec.MsgspecError, zmq.ZMQError) as error:
            _LOG.warning(
                "engine %.200r was asked for what its kvpatch says of its cache, and is taken for "
                "one without: %s",
                *(engine_id, error),
            )
            return {}
        return stated
