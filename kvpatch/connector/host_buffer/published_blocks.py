"""Which of a cache group's blocks P publishes, and from which step on they are complete. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedGroup:
    """How a cache group's blocks are published.

    Attributes:
        block_tokens: of one of the group's blocks.
        last_blocks: of a sliding window, how many of the last ones; 0 for all.
        full_blocks_only: whether a last, partly filled block is not published (0.10.0).
    """

    block_tokens: int
    last_blocks: int
    full_blocks_only: bool = False

    def needed(self, tokens: int) -> int:
        """Blocks that a request of so many tokens publishes."""
        count = tokens // self.block_tokens
        if not self.full_blocks_only and tokens % self.block_tokens:
            count += 1
        return min(count, self.last_blocks) if self.last_blocks else count

    def asked_for(self, blocks: Sequence[int], tokens: int) -> Sequence[int]:
        """Of the blocks of an answer those that hold what was asked for.

        Only a scheduler that computes a token more (:func:`is_complete`) has others, and windows
        came later.
        """
        return blocks if self.last_blocks else blocks[: self.needed(tokens)]

    def written(self, blocks: Sequence[int], start: int) -> list[int]:
        """Those that a step writes, which computes tokens from `start` on."""
        return [block for block in blocks[start // self.block_tokens :] if block]

    def ready(self, blocks: Sequence[int], end: int, prompt_tokens: int) -> list[int]:
        """Those that have their last content once the tokens before `end` are computed.

        Before the prompt's end a window's are left out: most of them will have slid out.
        """
        if end < prompt_tokens:
            stop = 0 if self.last_blocks else end // self.block_tokens
        else:
            stop = end // self.block_tokens if self.full_blocks_only else len(blocks)
        first = max(0, stop - self.last_blocks) if self.last_blocks else 0
        return [block for block in blocks[first:stop] if block]
