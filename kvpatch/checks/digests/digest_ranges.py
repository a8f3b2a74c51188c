"""Which tokens of a request its digest covers, and in which ranges they are told apart."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_256

from kvpatch.checks.digests.digests import Extent

#: The smallest block that engines use: where a prefix hit of D's ends, a range ends too.
_SMALLEST_TOKENS = 16
#: A sample is one run of ranges from each of so many lots.
_LOTS = 8
#: Of the ranges of a lot.
_SHARE = 8


def range_tokens_of(tokens: int, cells: int, most_cells: int) -> int:
    """The smallest ranges with which a digest of some tokens has room.

    Args:
        cells: of one range: heads, over all layers and contents.
        most_cells: of the digest.
    """
    size = _SMALLEST_TOKENS
    while size < tokens and cells * -(-tokens // size) > most_cells:
        size *= 2
    return size


def extents_of(
    first_token: int, end_token: int, range_tokens: int, seed: bytes, *, is_sample: bool
) -> tuple[Extent, ...]:
    """Runs of whole ranges, of all tokens or of a sample of them.

    A sample has a part from everywhere, drawn by the seed: who has the seed draws the same. It
    counts ranges from the request's first token on, whichever of its tokens are asked for.

    Args:
        end_token: of the request.
    """
    if not is_sample:
        return ((first_token, end_token),) if first_token < end_token else ()
    ranges = -(-end_token // range_tokens)
    found: list[Extent] = []
    lots = min(_LOTS, ranges)
    for lot in range(lots):
        begins, ends = ranges * lot // lots, ranges * (lot + 1) // lots
        taken = -(-(ends - begins) // _SHARE)
        drawn = int.from_bytes(shake_256(repr((seed, "sample", lot)).encode()).digest(8), "little")
        start = begins + drawn % (ends - begins - taken + 1)
        extent = start * range_tokens, min((start + taken) * range_tokens, end_token)
        if extent[0] >= first_token:
            found.append(extent)
    return joined(found)


def joined(extents: Sequence[Extent]) -> tuple[Extent, ...]:
    """Those that follow one another as one."""
    found: list[Extent] = []
    for start, end in extents:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)
