"""A message that P's handshake listener does not expect no longer ends it.

Why:
    The thread that answers handshakes ends by the first message that it cannot take: one of
    another shape, or one that asks for a rank that there is not. Nobody can shake hands with
    this engine again before it is restarted. It takes no access to the side channel: a client
    that sends D another `tp_size` than P's has D ask for such a rank (from 0.11.1 on).
Where:
    P, or whoever is read from: its scheduler, and <= 0.11.0 its workers.
How:
    Who asks for a rank that there is not gets an empty answer, which fails that handshake. After
    a message of another shape the listener begins anew.
Upstream:
    Nothing known.
Remove when:
    The listener checks what it is sent.
"""

from __future__ import annotations

import logging
from typing import Any

from kvpatch.core import seams
from kvpatch.core.ledger import Patch, Site, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown

_LOG = logging.getLogger("kvpatch.handshake_listener")


class _Answers:
    """The answers to handshakes by rank: a rank that does not exist gets an empty answer.

    Args:
        found: the release's own answers, to which it may still add.
    """

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getitem__(self, asked: Any) -> bytes:
        try:
            answer: bytes = self._found[asked]
        except (KeyError, TypeError):  # a rank may be a list, too
            _LOG.warning("a handshake asked for rank %s, which there is not", shown(asked))
            return b""
        return answer


def _listen(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    from msgspec import MsgspecError

    answers, *more = (*args, *kwargs.values())  # whatever they are called
    is_by_rank = isinstance(answers, dict)  # from 0.11.1
    while True:
        try:
            return wrapped(_Answers(answers) if is_by_rank else answers, *more)
        except (MsgspecError, ValueError, TypeError, RecursionError) as error:
            _LOG.warning("a handshake has another shape: %s", shown(str(error)))


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    return {seams.handshake_listener(facts): _listen}


PATCH = Patch(slug="handshake_listener", wire_affecting=False, sites=_sites, document=__doc__)
