"""How many tokens a peer's blocks have, where its handshake does not say.

To 0.11.0 a handshake states a block's bytes and not its tokens. Divided by our own
bytes of a token they come to a number of tokens, which is wrong where the peer's items
are of another size (fp8 beside bf16), and nothing in such a handshake tells the two
apart. From 0.11.1 on it states the tokens and the bytes of a kernel block, which settle
the items' size, and to 0.20 not how many kernel blocks a block is cut into; block ids
count blocks. So the sizes that are possible are kept for each peer, and each request
leaves the ones by which its prompt fills as many blocks as the peer names: of sizes
that are twice one another three blocks leave one, of 4 and 5 kernel blocks eight do.
Until one is left nothing is read that depends on which it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from kvpatch._errors import KvpatchError

#: Bytes that an item of a cache may have.
ITEM_BYTES = (1, 2, 4)
#: Behind the prompt a peer that drafts tokens may hold blocks for as many.
_DRAFTED_TOKENS = 16
#: What states them, among a handshake's fields.
_PARTS = "physical_blocks_per_logical_kv_block"
#: Blocks of more tokens are not looked for.
_MOST_TOKENS = 4096
#: Blocks that a backend may cut, and kernel blocks, are multiples of this.
CUT_INTO = 16
_CUT_SIZES = frozenset(range(CUT_INTO, _MOST_TOKENS + 1, CUT_INTO))


class BlocksUnknown(KvpatchError):
    """A request that cannot be read: the size of the peer's blocks is not proven, or not so."""


@dataclass(frozen=True)
class Span:
    """Sizes of a block, from the least to the most, in tokens; most is None for no end."""

    least: int = 1
    most: int | None = None

    def has(self, tokens: int) -> bool:
        return self.least <= tokens and (self.most is None or tokens <= self.most)

    def within(self, other: Span) -> Span:
        """The sizes in both."""
        ends = [end for end in (self.most, other.most) if end is not None]
        return Span(max(self.least, other.least), min(ends, default=None))

    def around(self, other: Span) -> Span:
        """The sizes in either, and between them."""
        most = None if self.most is None or other.most is None else max(self.most, other.most)
        return Span(min(self.least, other.least), most)

    @property
    def is_empty(self) -> bool:
        return self.most is not None and self.most < self.least

    def tells(self, step_tokens: int | None) -> bool:
        """Whether it has one multiple of the step at most.

        Without a step, no two sizes of which one is twice the other.
        """
        if self.most is None:
            return False
        if step_tokens is None:
            return self.least <= self.most < 2 * self.least
        return self.most // step_tokens - (self.least - 1) // step_tokens <= 1


def span_of(tokens: int, blocks: int, *, full_blocks_only: bool) -> Span:
    """The sizes of which a peer that holds `tokens` names `blocks` blocks.

    Args:
        full_blocks_only: whether it leaves the last, partial one out (0.10.0).
    """
    if full_blocks_only:
        least = tokens // (blocks + 1) + 1
        most = (tokens + _DRAFTED_TOKENS - 1) // blocks if blocks else None
        return Span(least, most)
    if not blocks:
        return Span(1, 0)  # a prompt has a token at least
    most = (tokens + _DRAFTED_TOKENS - 1) // (blocks - 1) if blocks > 1 else None
    return Span(-(-tokens // blocks), most)


def windowed_blocks(size: int, tokens: int, window_tokens: int) -> int:
    """How many blocks of a size are named of a sliding window (0.18 to 0.25).

    The last ones of the prompt's, null blocks among them: as many as the window fills, and
    one, for it may begin anywhere in a block.
    """
    return min(-(-tokens // size), -(-window_tokens // size) + 1)


def may_be(size: int, tokens: int, blocks: int, window_tokens: int) -> bool:
    """Whether a peer whose blocks have a size may name so many of a sliding window."""
    least = windowed_blocks(size, tokens, window_tokens)
    return least <= blocks <= windowed_blocks(size, tokens + _DRAFTED_TOKENS, window_tokens)


class BlockTokens:
    """What is known of the tokens of the blocks that a peer's ids count.

    Args:
        possible: every size that the handshake leaves open.
        readable: those of them that can be read.
        assumed: what the release takes for granted of a peer like us; None to refuse a
            request that leaves several open.
        full_blocks_only: whether the peer names no partial block (0.10.0).
    """

    def __init__(
        self,
        possible: Iterable[int],
        readable: Iterable[int],
        assumed: int | None = None,
        *,
        full_blocks_only: bool = False,
    ) -> None:
        self._all = self._possible = frozenset(possible)
        self._readable = frozenset(readable)
        self._assumed = self._first_assumed = assumed
        self._full_blocks_only = full_blocks_only

    def is_of(self, other: BlockTokens) -> bool:
        """Whether another handshake, of another rank say, left the same open."""
        return (self._all, self._readable, self._first_assumed) == (
            other._all,
            other._readable,
            other._first_assumed,
        )

    def is_readable_as_one(self) -> bool:
        """Whether there is but one size that can be read."""
        return len(self._readable) == 1

    def learn(self, tokens: int, blocks: int, window_tokens: int = 0) -> None:
        """Leaves the sizes of which a prompt fills as many blocks as the peer names.

        Args:
            window_tokens: of a sliding window, of which the peer names the last blocks alone;
                0 where it names all of the prompt's.

        Raises:
            BlocksUnknown: none does. This request or one before it was not the same on both
                sides, and nobody knows which: later ones have to tell again which of the
                sizes it is that either leaves.
        """
        if window_tokens:
            found = {s for s in self._all if may_be(s, tokens, blocks, window_tokens)}
        else:
            span = span_of(tokens, blocks, full_blocks_only=self._full_blocks_only)
            found = {size for size in self._all if span.has(size)}
        left = self._possible & found
        if left:
            self._possible = left
            return
        known = self._possible
        self._possible |= found
        self._assumed = None
        raise BlocksUnknown(
            f"its blocks have {_listed(known)} tokens, and {blocks} of them are named "
            f"for a prompt of {tokens}: send both engines the same prompt, and use one model, "
            "--dtype and --kv-cache-dtype"
        )

    def assume_nothing(self) -> None:
        """Has a peer like us prove its size too, where prompts may never tell it."""
        self._assumed = None

    def tokens(self) -> int:
        """The size to read by.

        Raises:
            BlocksUnknown: several are possible, or the one that is cannot be read.
        """
        if len(self._possible) == 1:
            (found,) = self._possible
            if found in self._readable:
                return found
        elif self._assumed in self._possible:
            return int(self._assumed)
        if not self._possible & self._readable:
            raise BlocksUnknown(
                f"its blocks have {_listed(self._possible)} tokens, and their bytes are ours only "
                f"if it were {_listed(self._readable)}: use one --kv-cache-dtype and --dtype on "
                "both sides"
            )
        raise BlocksUnknown(
            f"its blocks may have {_listed(self._possible)} tokens; this release's handshake does "
            "not say, and a prompt of several blocks has to tell first: send one, let D "
            'compute such prompts (kv_load_failure_policy "recompute", from 0.13), or use vLLM '
            "0.21 or later"
        )


class Introductions:
    """Which engines a scheduler may load from: those that its workers can tell the blocks of.

    Workers cannot fail one request to 0.11.0. So the scheduler, which knows neither the
    peer's bytes nor its own, has D compute a prompt until those before it leave no two
    sizes of which one is twice the other; P is told, as of a full prefix hit. From 0.17 to
    0.20 a worker would fail the first prompts of a peer that may have cut its blocks, like
    ones too: there it is multiples of a kernel block that have to be told apart.

    Args:
        block_tokens: of our own blocks.
        full_blocks_only: whether no partial block is moved (0.10.0).
        step_tokens: what a peer's blocks are a multiple of; None where nothing is known.
        allows_none: whether nothing is to be loaded from anybody.
        must_prove: whether workers have to prove an engine's layout first (0.10.0).
        window_tokens: of the sliding window whose last blocks are all that peers name; 0
            where they name all blocks of a prompt.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        full_blocks_only: bool = False,
        step_tokens: int | None = None,
        allows_none: bool = False,
        window_tokens: int = 0,
        must_prove: bool = False,
    ) -> None:
        self._allows_none = allows_none
        self._must_prove = must_prove
        self._proven: set[str] = set()
        self._window_tokens = window_tokens
        self._block_tokens = block_tokens
        self._full_blocks_only = full_blocks_only
        self._step_tokens = step_tokens
        self._spans: dict[str, Span] = {}
        self._windowed: dict[str, frozenset[int]] = {}

    def prove(self, engine_id: str) -> None:
        """Books that all workers can tell an engine's layout."""
        self._proven.add(engine_id)

    def allow(self, engine_id: str, tokens: int, blocks: int, needed_tokens: int) -> bool:
        """Whether a prompt may be loaded of which an engine names some blocks.

        Args:
            needed_tokens: up to where it would be loaded.
        """
        if self._allows_none or not blocks:
            return False
        if self._window_tokens:
            return self._allow_windowed(engine_id, tokens, blocks)
        span = span_of(tokens, blocks, full_blocks_only=self._full_blocks_only)
        before = self._spans.get(engine_id, Span())
        known = before.within(span)
        if known.is_empty:  # not one prompt on both sides, once: who knows when
            known = before.around(span)
        self._spans[engine_id] = known
        if not known.tells(self._step_tokens):
            return False
        if self._must_prove and engine_id not in self._proven:
            return False
        is_like = blocks == tokens // self._block_tokens
        return not self._full_blocks_only or is_like or blocks * known.least >= needed_tokens

    def _allow_windowed(self, engine_id: str, tokens: int, blocks: int) -> bool:
        found = {n for n in _CUT_SIZES if may_be(n, tokens, blocks, self._window_tokens)}
        before = self._windowed.get(engine_id, _CUT_SIZES)
        known = before & found or before | found
        self._windowed[engine_id] = known
        # A handshake states the kernel block; peers of another are the workers' to judge.
        own = _kernel_of(self._block_tokens)
        return sum(_kernel_of(size) == own for size in known) <= 1


def _kernel_of(block_tokens: int) -> int:
    """What FlashInfer cuts blocks into, which takes the most sizes of those that cut any."""
    return next((size for size in (64, 32, 16) if block_tokens % size == 0), block_tokens)


#: What FlashInfer, FlashMLA and CUTLASS cut larger blocks into: multiples of this.
KERNEL_TOKENS = 64


def step_of_cuts(block_tokens: int, device_type: str) -> int | None:
    """What has to be told apart of a peer that has our kernel blocks and may cut others.

    Multiples of 64 where ours are. Smaller blocks may be parts of odd multiples alone (48
    cut into 16), which the first prompt that fills two blocks tells from ours.
    None for the CPU's blocks, which nobody cuts.
    """
    if device_type == "cpu":
        return None
    return _MOST_TOKENS + 1 if block_tokens % KERNEL_TOKENS else KERNEL_TOKENS


def _listed(sizes: Iterable[int]) -> str:
    found = sorted(sizes)
    return ", ".join(map(str, found[:4])) + (" or more" if len(found) > 4 else "")


def sizes_by_item(block_tokens: int, item_bytes: int) -> tuple[int, ...]:
    """The tokens of a block that has `block_tokens` of our items, for items of every size."""
    found = (divmod(block_tokens * item_bytes, other) for other in ITEM_BYTES)
    return tuple(sorted({tokens for tokens, rest in found if tokens and not rest}))


@dataclass(frozen=True)
class KernelSizes:
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
        """Into how many kernel blocks of a size a block may have been cut."""
        most = max(_MOST_TOKENS // kernel_tokens, 1)
        every = tuple(range(1, most + 1))
        found = tuple(n for n in every if self._kernel_of(kernel_tokens * n) == kernel_tokens)
        # No block comes to this: its backend is not quite ours, and all has to be proven.
        return found or every

    def _kernel_of(self, block_tokens: int) -> int | None:
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


def kernel_sizes(worker: Any) -> KernelSizes | None:
    """How this release cuts blocks for the worker's backends; None where nobody can tell.

    And where nobody asks: to 0.11.0 none is cut, and from 0.21 on the handshake says it.
    """
    backends = _backends(worker)
    if not backends or _states_parts(worker):
        return None
    from vllm.config import cache, set_current_vllm_config

    exact: list[tuple[int, ...]] = []
    multiples: list[tuple[int, ...]] = []
    with set_current_vllm_config(worker.vllm_config):
        for backend in backends:
            sizes = _sizes_of(backend)
            if sizes is None:
                return None
            exact.append(tuple(size for size in sizes if isinstance(size, int)))
            multiples.append(tuple(size.base for size in sizes if not isinstance(size, int)))
    allowed = get_args(getattr(cache, "BlockSize", None))  # to 0.17
    return KernelSizes(tuple(exact), tuple(multiples), tuple(allowed) or None)


def _states_parts(worker: Any) -> bool:
    modules = (sys.modules.get(owner.__module__) for owner in type(worker).__mro__)
    return states_parts(modules)


def states_parts(modules: Iterable[Any]) -> bool:
    """Whether the handshake of these modules says how many kernel blocks a block has."""
    kinds = (getattr(module, "NixlAgentMetadata", None) for module in modules)
    return any(_PARTS in getattr(kind, "__annotations__", ()) for kind in kinds)


def _backends(worker: Any) -> Sequence[Any]:
    several = getattr(worker, "attn_backends", None)  # from 0.18
    if several:
        return tuple(several)
    topology = getattr(worker, "kv_topo", None)
    one = getattr(worker, "attn_backend", None) or getattr(topology, "attn_backend", None)
    return () if one is None else (one,)


def _sizes_of(backend: Any) -> Sequence[Any] | None:
    """Sizes, and what has multiples as `base`."""
    of_class = getattr(backend, "supported_kernel_block_sizes", None)  # 0.11.1 and 0.11.2
    ask = getattr(backend, "get_supported_kernel_block_sizes", None)
    found = of_class if ask is None else ask()
    return None if found is None else list(found)
