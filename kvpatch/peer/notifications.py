"""Takes out of NIXL's notifications what ends a release's engine: odd ones of whatever peer.

A peer says that it has read a request (``NAME:NUMBER``), or that it still wants some (``HB:``).
The release takes each notification for one of these, and raises where it is none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.transfer.lifetime import HEARTBEAT

_LOG = logging.getLogger("kvpatch.unlike_engines")

_READ = re.compile(r"(.+):([1-9][0-9]{0,5})", re.DOTALL)
#: A peer's registration in push mode, which the release reads by itself.
_REGISTRATION = b"PUSH_REG:"


class Notifications:
    """The filter of one worker's notifications."""

    def __init__(self, worker: Any, facts: ReleaseFacts) -> None:
        self._worker, self._facts = worker, facts
        self._dropped = 0

    def understood(self, found: Mapping[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        """Returns what the release can take, by sender."""
        kept = {sender: [*filter(self._is_understood, sent)] for sender, sent in found.items()}
        return {sender: messages for sender, messages in kept.items() if messages}

    def _is_understood(self, message: bytes) -> bool:
        is_understood = message.startswith(_REGISTRATION) or self._can_be_taken(message)
        if not is_understood:
            self._dropped += 1
            if not self._dropped & (self._dropped - 1):  # a peer cannot fill the log
                _LOG.warning(
                    "a peer notifies this engine of %s, which says nothing to it (%d such so far)",
                    *(shown(message), self._dropped),
                )
        return is_understood

    def _can_be_taken(self, message: bytes) -> bool:
        try:
            text = message.decode()
        except UnicodeDecodeError:
            return False
        if self._facts.grants_leases and message.startswith(HEARTBEAT):
            return True
        read = _READ.fullmatch(text)
        if read is None:
            return False
        if self._facts.reader_count == "ranks":
            least, most = sorted((int(read[2]), int(self._worker.world_size)))
            return most % least == 0
        return self._facts.forgives_unknown_reads or read[1] in self._worker._reqs_to_send
