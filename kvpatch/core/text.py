"""The form in which a client's or a peer's text may stand in a message or a log."""

from __future__ import annotations

import reprlib

#: Longer texts are cut: who sends them could fill a disk with logs.
_MOST = 200


class _Short(reprlib.Repr):
    """Keeps to the start of a text and of a list, however long they are."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MOST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out some, and takes long for others."""
        if x.bit_length() > 256:
            return f"<an integer of {x.bit_length()} bits>"
        return repr(x)


_SHORT = _Short()


#: A whole message has both geometries in it.
_MOST_OF_MESSAGE = 4000


def one_line(text: object) -> str:
    """A message that may have a client's or a peer's words in it: no second line, and an end."""
    found = str(text)
    if len(found) > _MOST_OF_MESSAGE:
        found = f"{found[:_MOST_OF_MESSAGE]}... ({len(found)} characters)"
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in found)


def shown(value: object) -> str:
    """A value in one line and a few hundred characters: no forged lines, no 10 MB."""
    found = _SHORT.repr(value)
    return found if len(found) <= 2 * _MOST else found[: 2 * _MOST] + "..."
