"""The definition of a digest of cached bytes, and how surely it notices that bytes are wrong.

P's worker makes them when a request is over, and D's of what it has loaded, before it reports it.

A digest is made in two sums. All numbers are whole and of 64 bits, and what goes beyond is
dropped, so that no order of adding matters.

1. A *row* is a token of one head, in keys or in values: its channels' bytes in the order of the
   channels, as signed words of 32 bits, whatever the data type and wherever a layout puts them. The
   row's sum is that of each word times the weight of the word's place.
2. A *cell* is the rows of one layer, content and head in a range of tokens. Each row's sum is cut
   into two halves of 32 bits, the upper one signed; the cell's sum is that of both times their
   weights, which belong to the token's position in the request.
Weights are odd and drawn by SHAKE-256 from a seed that both sides know, and from positions in the
row and in the prompt: never from addresses, blocks or ranks. So layouts, block sizes and ranks
come to the same sums. Sums of cells over parts of a range add up to the range's.

**How surely.** Let the bytes differ in any way that does not depend on the seed.

- *One step.* Take two unlike lists of words of 32 bits, and weights that are drawn for them. Let
  2**v be the highest power of two that divides every difference between them: v is at most 31. One
  word differs by an odd multiple of 2**v. Whatever the other weights are, the sums are equal only
  if this word's weight has one certain value in its lowest 64 - v bits. One of these bits is known,
  as weights are odd, and the others are drawn: a chance of 1 in 2**(63 - v), 2**-32 at most. If no
  other word differs the sums are never equal, since odd times a difference below 2**32 is no
  multiple of 2**64.
- *Two steps.* For wrong bytes to be missed, all wrong rows of a cell have to come to their right
  sums, or those that do not have to come to the right sum of the cell. Each step has weights of its
  own, so each has a chance of at most 2**-32: together below 2 in 2**32, once in 2.1 billion loads
  *that are wrong*, whatever was wrong with them.
- *Usually* far less: in stale data the lowest bit of some word differs, and then the first step's
  chance is 2**-63. The bound is reached by errors like the signs of many ``float32`` values alone.
  A row with one wrong word, thus one with a single wrong bit, has a wrong sum for certain.

Nothing has to be assumed about errors that "cancel": swapped blocks, heads or layers, keys for
values, values twice as large and shifts by a token are unlike lists of words like all others, and
two errors cancel with the chance above. That is why words are multiplied and not mixed otherwise.
What it rests on is that SHAKE-256's numbers are as good as drawn ones, and that errors do not
follow the seed: a new one for each request also keeps a repeated error from being missed twice.

**What it does not notice.** Bytes outside the tokens that it covers. What was wrong before P's
digest, or goes wrong behind D's. Whoever wants to deceive: who knows the seed can find other bytes
of one sum. Bytes in another place that are the same bytes, which are no error. And it alarms where
bytes differ and values do not, as 0.0 and -0.0.
"""

from __future__ import annotations

from hashlib import shake_256

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

WORD_BYTES = 4
#: A longer row, a recurrent state, is cut into rows of so many words.
ROW_WORDS = 1024
_DRAWN_AT_ONCE = 64
HALF_BITS = 32
LOW_HALF = 2**32 - 1


def rows_of(row_bytes: int) -> tuple[int, int]:
    """(rows that a token's channels of one head are cut into, words of each), rounded up."""
    words = -(-row_bytes // WORD_BYTES)
    return (1, words) if words <= ROW_WORDS else (-(-words // ROW_WORDS), ROW_WORDS)


class Weights:
    """The weights of one request, or of all requests that share a seed.

    Args:
        seed: a value that both sides know, for example a request's id.
    """

    def __init__(self, seed: bytes) -> None:
        self.seed = seed

    def words(self, count: int) -> UInt64Array:
        """[word] of a row."""
        return self._drawn("word", 0, count)

    def rows(self, first: int, end: int) -> UInt64Array:
        """[half, row] of rows from one to another; a token has as many as :func:`rows_of` says."""
        halves: UInt64Array = self._drawn("row", 2 * first, 2 * end).reshape(-1, 2).T
        return halves

    def _drawn(self, what: str, first: int, end: int) -> UInt64Array:
        """Odd numbers by their place in a series, the same wherever a part of it begins."""
        lots = range(first // _DRAWN_AT_ONCE, -(-end // _DRAWN_AT_ONCE))
        raw = b"".join(
            # As Python writes them down, no two unlike ones look alike.
            shake_256(repr((self.seed, what, lot)).encode()).digest(8 * _DRAWN_AT_ONCE)
            for lot in lots
        )
        numbers: UInt64Array = np.frombuffer(raw, "<u8").astype(np.uint64) | np.uint64(1)
        return numbers[first - lots.start * _DRAWN_AT_ONCE :][: end - first]
