"""Into how many kernel blocks a peer cuts its blocks: told by where it holds what (0.11.1 to 0.20).

Block ids come from a client, and count blocks of a size that nobody has stated: whoever writes two
ids for one makes blocks look half as large, and their content is still right. So ids only say where
to look. What counts is what lies there:

- A chunk is a kernel block's worth of a prompt's tokens. A peer that cuts its blocks into n kernel
  blocks holds chunk j in a kernel block whose number leaves the same rest as j when divided by n.
- Block 0 is vLLM's null block, which nobody writes to, and block 1 is the first that is handed out.
  So of the kernel blocks behind number 0, the first that was ever written to is number n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: Looked at of a list of blocks: each says the same of all of its chunks.
_MOST_BLOCKS = 8


class PromptChunk(NamedTuple):
    """Some tokens of a prompt that one kernel block may hold.

    Attributes:
        number: of the chunk, counted in kernel blocks from the prompt's beginning.
        block: the kernel block.
        tokens: of them, its first ones.
    """

    number: int
    block: int
    tokens: int


def chunks_to_look_at(
    ids: Sequence[int], parts: int, kernel_tokens: int, known: range, first_block: int = 0
) -> Iterator[PromptChunk]:
    """Where chunks would lie if ids counted blocks of so many kernel blocks.

    One of each block, the first whose beginning is among the tokens that we know.

    Args:
        known: the tokens of the prompt that we have computed ourselves.
        first_block: the place of the first id in the prompt's table.
    """
    for place, block in enumerate(ids[:_MOST_BLOCKS], first_block):
        start = place * parts
        number = max(start, -(-known.start // kernel_tokens))
        tokens = min(kernel_tokens, known.stop - number * kernel_tokens)
        if block and number < start + parts and tokens > 0:  # block 0 has slid out of a window
            yield PromptChunk(number, block * parts + number - start, tokens)


def possible_splits(
    parts: Iterable[int], seen: Iterable[tuple[int, int]], first_written: int | None
) -> frozenset[int]:
    """Those of the ways to cut blocks that what was seen leaves.

    Args:
        seen: (chunk, kernel block) of each that holds what it should.
        first_written: the first kernel block but number 0 that was ever written to; None
            where that is not known.
    """
    found = frozenset(n for n in parts if all((block - chunk) % n == 0 for chunk, block in seen))
    if first_written not in found:
        return found
    # With fewer parts block 1 would begin before, and the peer has used it.
    return frozenset(n for n in found if n >= first_written)
