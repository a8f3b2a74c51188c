"""What P's answer says of the blocks that it holds: as text, in ``kv_transfer_params``.

Whoever passes the answer on may be a program that knows no whole numbers over 2**53, so that
numbers are hexadecimal and the whole of it is one string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpatch.core.errors import AS_ANSWERED, ReadRefused
from kvpatch.core.text import shown
from kvpatch.load.read_request import HOLD

# An address of 60 bits and a slot behind it are a number of 64.
_FORM = re.compile(r"1/([0-9a-f]{1,16})/([0-9a-f]{1,15}(?:,[0-9a-f]{1,15}){0,1023})")
_ANY_FORM = re.compile(r"[0-9]{1,4}/.{0,65536}", re.DOTALL)


@dataclass(frozen=True)
class Hold:
    """A request's, at one engine.

    Attributes:
        generation: the word that stands in the tables of P's ranks while they hold the blocks.
        tables: by rank of P's, where its table of holds begins, masked (``transfer/nixl.py``).
    """

    generation: int
    tables: tuple[int, ...]

    def __str__(self) -> str:
        tables = ",".join(f"{address:x}" for address in self.tables)
        return f"1/{self.generation:x}/{tables}"


def read_hold(stated: str) -> Hold | None:
    """The hold that P has stated; None of a form that only a newer kvpatch knows.

    Raises:
        ReadRefused: it is no hold of any form.
    """
    found = _FORM.fullmatch(stated)
    if found is None:
        if _ANY_FORM.fullmatch(stated) and not stated.startswith("1/"):
            return None
        raise ReadRefused(
            f"kv_transfer_params.{HOLD} is {shown(stated)}, which no P says", AS_ANSWERED
        )
    tables = (int(address, 16) for address in found[2].split(","))
    return Hold(int(found[1], 16), tuple(tables))
