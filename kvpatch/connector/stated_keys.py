"""What P's kvpatch says of its keys, beside all that its release states; and how D hears it.

A release's handshake has no word for how a CPU's keys lie. P's answer at its side channel is a map
of names, of which every release takes those that it knows: P's kvpatch adds one. D's release lets
go of it, so that D's kvpatch asks once more where it has to know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from kvpatch.connector.handshake.cpu_keys import order_of, word_of
from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.recent_engines import RecentEngines
from kvpatch.connector.unlike_releases.side_channel import Address, ask, question_for
from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import KeyOrder

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: In P's answer; of a worker's metadata, on its way to its scheduler.
FIELD = "kvpatch_keys"
_WORD = "_kvpatch_keys"

# --- the side that is read --------------------------------------------------------


def state_keys(release: ReleaseWorker, metadata: Any) -> None:
    """Writes how a worker's keys lie onto what it states, where that depends on its processor."""
    order = release.key_order() if release.tiles_on_amx else None
    word = None if order is None else word_of(order)
    if word is not None:
        setattr(metadata, _WORD, word)


def with_stated_keys(metadata: Mapping[Any, Any]) -> dict[Any, Any]:
    """What workers state, as their scheduler encodes it for peers: with one name more."""
    return {rank: _with_word(stated) for rank, stated in metadata.items()}


def _with_word(stated: Any) -> Any:
    word = vars(stated).pop(_WORD, None)
    if word is None:
        return stated
    kind = type(stated)
    with_field = make_dataclass(kind.__name__, [(FIELD, str, field(default=""))], bases=(kind,))
    known = {one.name: getattr(stated, one.name) for one in fields(stated)}
    found = with_field(**known, **{FIELD: word})
    # What other patches have written onto it, for their own parts of the scheduler.
    vars(found).update({n: v for n, v in vars(stated).items() if n not in known})
    return found


# --- the side that reads ----------------------------------------------------------


@dataclass(eq=False)
class SideChannels:
    """Where a worker's peers answer, by engine id."""

    found: RecentEngines[Address] = field(default_factory=RecentEngines)

    def keys_of(self, engine_id: str, tp_rank: int, facts: ReleaseFacts) -> KeyOrder | None:
        """How a rank's keys lie by its own kvpatch's word; None where nobody says."""
        import msgspec

        address = self.found.get(engine_id)
        if address is None or not facts.encodes_metadata:
            return None
        try:
            payload, *_ = ask(address, question_for(facts.question, tp_rank))
            stated = msgspec.msgpack.decode(payload, type=dict[str, Any])
        except (PeerRefused, msgspec.MsgspecError) as error:
            _LOG.debug("engine %.200r does not say how its keys lie: %s", engine_id, error)
            return None
        return order_of(stated.get(FIELD))
