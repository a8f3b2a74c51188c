"""The kernel blocks that a peer's blocks may be cut into, where its handshake does not say.

From 0.11.1 on a handshake states the tokens and the bytes of a kernel block, and on releases
<= 0.20 not how many kernel blocks a block is cut into; block ids count blocks. P's kvpatch states
it, or the operator declares it. So it is on releases <= 0.11.0, whose handshakes state a block's
bytes and not its tokens: divided by the local bytes of a token they come to a number of tokens,
which is wrong where the peer's items are of another size (fp8 beside bf16). 0.10.0 does not state
the layout either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from kvpatch.core.releases import ReleaseFacts
from kvpatch.worker.release_worker import ReleaseWorker

#: Blocks of more tokens are not looked for.
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class KernelBlockSizes:
    """How a release cuts blocks: whole where all backends take them, else into the largest
    size that all take.

    Attributes:
        exact: per backend, the sizes that it takes.
        multiples: per backend, numbers whose multiples it takes.
        blocks: the sizes of blocks that the release allows; None for any.
    """

    exact: tuple[tuple[int, ...], ...]
    multiples: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...] | None = None

    def parts(self, kernel_tokens: int) -> tuple[int, ...]:
        """Returns the possible numbers of kernel blocks, of a given size, in a block."""
        if not self.cuts_some:
            return (1,)  # also of a size that this release does not allow
        most = max(_MOST_TOKENS // kernel_tokens, 1)
        every = tuple(range(1, most + 1))
        found = tuple(n for n in every if self.kernel_of(kernel_tokens * n) == kernel_tokens)
        # No block comes to this: its backend is not quite ours, and any is possible.
        return found or every

    @property
    def cuts_some(self) -> bool:
        """True if there are blocks that the release cuts."""
        return any(self.exact)

    def kernel_of(self, block_tokens: int) -> int | None:
        """Returns the tokens of a block's kernel blocks; None for a block that is not allowed."""
        if self.blocks is not None and block_tokens not in self.blocks:
            return None
        if self._takes(block_tokens):
            return block_tokens
        sizes = sorted({size for taken in self.exact for size in taken}, reverse=True)
        return next((n for n in sizes if block_tokens % n == 0 and self._takes(n)), None)

    def _takes(self, tokens: int) -> bool:
        return all(
            tokens in exact or any(tokens % base == 0 for base in bases)
            for exact, bases in zip(self.exact, self.multiples, strict=True)
        )


def kernel_block_sizes(release: ReleaseWorker) -> KernelBlockSizes | None:
    """Returns how a release cuts blocks for the worker's backends; None if that is unknown.

    Nobody asks <= 0.11.0, where no block is cut, and from 0.21 on, where the handshake says it.
    """
    facts = release.facts
    if not facts.states_block_size or facts.states_kernel_blocks:
        return None
    from vllm.config import cache, set_current_vllm_config

    exact: list[tuple[int, ...]] = []
    multiples: list[tuple[int, ...]] = []
    with set_current_vllm_config(release.worker.vllm_config):
        for backend in release.backends:
            sizes = _sizes_of(backend, facts)
            if sizes is None:
                return None
            exact.append(tuple(size for size in sizes if isinstance(size, int)))
            multiples.append(tuple(size.base for size in sizes if not isinstance(size, int)))
    allowed = get_args(cache.BlockSize) if facts.lists_block_sizes else ()
    return KernelBlockSizes(tuple(exact), tuple(multiples), tuple(allowed) or None)


def _sizes_of(backend: Any, facts: ReleaseFacts) -> Sequence[Any] | None:
    """Sizes, and what has multiples as `base`."""
    if facts.asks_for_kernel_sizes:
        found = backend.get_supported_kernel_block_sizes()
    else:
        found = backend.supported_kernel_block_sizes
    return None if found is None else list(found)
