"""A peer whose hash nobody compared, and whose backend puts rows where ours does not."""

from __future__ import annotations

from kvpatch.core.errors import PeerRefused
from kvpatch.core.releases import ReleaseFacts

#: What the table of releases says behind a form whose keys lie by column.
BY_COLUMN = ", keys by column"


def refuse_other_rows(facts: ReleaseFacts, own_backend: str, backend: object) -> None:
    """Refuses what the release would take for our rows.

    What it reads into a CPU's cache it reorders itself, or ends by it. Keys by column are in nobody
    else's cache, known to the table of releases or not.

    Args:
        backend: of the peer, as it states it (from 0.20).

    Raises:
        PeerRefused: its blocks have as many bytes as ours, in other places.
    """
    own, theirs = facts.form_of(own_backend), facts.form_of(str(backend))
    if theirs is None or own == theirs:
        return
    if own is None:
        is_misread = theirs.endswith(BY_COLUMN)
    else:
        is_misread = not own.endswith(BY_COLUMN) or facts.ends_by_reordering
    if is_misread:
        raise PeerRefused(
            f"its attention backend is {backend}, whose blocks are {theirs}, and ours "
            f"{own_backend}, whose blocks are {own or 'rows, or not known here'}",
            "set KVPATCH_ACCEPT=attn_backend here, and leave enforce_handshake_compat on, which "
            "has its hash compared, or use one attention backend on both sides",
        )
