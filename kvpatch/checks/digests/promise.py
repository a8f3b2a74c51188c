"""The text by which P's answer promises digests, in ``kv_transfer_params``, beside its hold.

Numbers are hexadecimal and all of it is one string, as in the hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpatch.core.errors import NoDigest
from kvpatch.core.text import shown
from kvpatch.load.read_request import DIGEST

_FORM = re.compile(r"1/([0-9a-f]{1,15}(?:,[0-9a-f]{1,15}){0,1023})")
_ANY_FORM = re.compile(r"[0-9]{1,4}/.{0,65536}", re.DOTALL)


@dataclass(frozen=True)
class Promise:
    """The promise that each of P's ranks will have a digest of a request.

    Attributes:
        tables: by rank of P's, where its table of digests begins, masked as a hold's.
    """

    tables: tuple[int, ...]

    def __str__(self) -> str:
        return f"1/{','.join(f'{address:x}' for address in self.tables)}"


def read_promise(stated: str) -> Promise | None:
    """Returns what P has stated; None of a form that only a newer kvpatch knows.

    Raises:
        NoDigest: it is of no form.
    """
    found = _FORM.fullmatch(stated)
    if found is None:
        if _ANY_FORM.fullmatch(stated) and not stated.startswith("1/"):
            return None
        raise NoDigest(
            f"kv_transfer_params.{DIGEST} is {shown(stated)}, which no P says: pass on all that P "
            "answered, as it is"
        )
    return Promise(tuple(int(address, 16) for address in found[1].split(",")))
