"""A request to read from a peer: whose transfers it is read by, or why it fails.

Of most peers like us the release pairs the blocks by their places in two lists. P's may go on
behind the tokens that D loads, or have other sizes: where a list of P's can be cut so that the
release pairs it rightly it is, and else the load is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from kvpatch.core.errors import (
    AS_ANSWERED,
    KvpatchError,
    ReadRefused,
    UnexpectedRead,
    UnlikePrompts,
)
from kvpatch.core.proxies import replaced
from kvpatch.geometry.segments import BlockList, kernel_blocks
from kvpatch.load import read_request
from kvpatch.load.mapped_pages import MappedPages, refuse_unmapped
from kvpatch.load.read_request import ReorderedLoads
from kvpatch.load.reader import Loads, Reader, RequestContext
from kvpatch.load.token_pairing import blocks_to_end, window_end
from kvpatch.worker.kv_cache_groups import (
    Group,
    reserves_slots,
    tokens_of_group,
    transferred_groups,
)
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state

_ONE_PROMPT = "send both engines the same prompt"
_ONE_BLOCK_SIZE = "use one --block-size on both sides"
_ON_IN_SCHEDULER = "set ENABLE_KVPATCH for the scheduler's process too"


@contextmanager
def request_read(worker: Any, request_id: str, meta: Any) -> Iterator[None]:
    """While inside, the release prepares a request's transfers, and they are what they must be."""
    state = worker_state(worker)
    loads, facts = state.held(Loads), state.facts
    read_request.restore_remote_blocks(meta, facts)
    engine_id, request = read_request.engine_of(meta, facts), read_request.read_request_of(meta)
    context = RequestContext(request_id, engine_id, request)
    blocks = NamedBlocks(worker, context, meta)
    if request is not None and request.stages > 1:
        read_request.count_stages(worker, engine_id, request.stages)
    if loads is None:  # nothing is registered that could be read into
        yield
        return
    if request is not None:
        if request.is_read_back:  # else P states null, and typed proxies 0.0
            context.expires = read_request.stated_end(worker, engine_id, meta, facts)
        if loads.check_makers:
            context.is_as_read = blocks.smaller is None and not _is_remade(worker, engine_id)
            for check_load in loads.check_makers:
                check_load(context, request)
    with replaced(loads, context=context):
        try:
            if context.refusal is None:
                blocks.choose(context)
        except KvpatchError as error:
            context.refusal = error
        if context.refusal is not None:
            context.is_of_smaller = blocks.smaller is not None
            blocks.name_preparable()
        yield


def _is_remade(worker: Any, engine_id: str) -> bool:
    """True if the release makes its own of a peer's blocks behind the reads, as of smaller ones.

    It permutes those of all peers once it was told to (from 0.11.1), and reorders those of another
    backend for a CPU's (from 0.20).
    """
    permutes = bool(getattr(worker, "enable_permute_local_kv", False))
    return permutes or engine_id in worker_state(worker).of(ReorderedLoads).peers


class Blocks(NamedTuple):
    """The blocks of one side.

    Attributes:
        kernel_tokens: of a kernel block.
        parts: kernel blocks in one of the blocks that ids count.
    """

    kernel_tokens: int
    parts: int

    @property
    def tokens(self) -> int:
        """Returns the tokens of one of the blocks that ids count."""
        return self.kernel_tokens * self.parts

    def of_group(self, tokens: int, stated: int) -> Blocks:
        """Returns the blocks of a cache group of this side.

        Groups of unlike heads have blocks of unlike tokens, of which a side states one.

        Args:
            tokens: of a block of the group of ours.
            stated: of the block that we state.

        Raises:
            ReadRefused: there is no such block.
        """
        kernel_tokens, rest = divmod(self.kernel_tokens * tokens, stated)
        if rest:
            raise ReadRefused(
                f"the peer's blocks would have {self.kernel_tokens * tokens / stated} tokens in a "
                f"cache group of which ours have {tokens}",
                _ONE_BLOCK_SIZE,
            )
        return Blocks(kernel_tokens, self.parts)


class NamedBlocks:
    """The blocks that one request names, which the release is about to pair.

    Args:
        entry: the request's, in the connector's metadata.
    """

    def __init__(self, worker: Any, context: RequestContext, entry: Any) -> None:
        state = worker_state(worker)
        self._worker, self._entry, self._facts = worker, entry, state.facts
        self._engine_id, self._request = context.engine_id, context.request
        self._reader, self._pages = state.held(Reader), state.held(MappedPages)
        self._is_known = self._engine_id in worker._remote_agents

    @cached_property
    def _groups(self) -> tuple[Group, ...]:
        return ReleaseWorker(self._worker, self._facts).groups(())

    @property
    def _remote(self) -> tuple[tuple[int, ...], ...]:
        return read_request.groups(read_request.remote_blocks(self._entry, self._facts))

    @cached_property
    def smaller(self) -> tuple[Blocks, Blocks | None] | None:
        """Our blocks, and those of a peer that has smaller ones as the release has booked it.

        None for any other peer. Theirs are None where it is not known into what they are cut.
        """
        worker, topology = self._worker, self._facts.topology
        own_tokens = getattr(worker, "block_size", None)  # missing in workers of vLLM's own tests
        if own_tokens is None or not self._is_known or not topology:
            return None
        parts: int | None = None
        if topology == "transfer_topo":
            booked = worker.transfer_topo.get_engine_info(self._engine_id)
            tokens, parts = booked.remote_block_size, booked.remote_physical_blocks_per_logical
        else:
            tokens = worker.kv_topo.remote_block_size[self._engine_id]
        if tokens >= own_tokens:
            return None
        ours = Blocks(own_tokens, worker._physical_blocks_per_logical_kv_block)
        if parts is None and ours.parts == 1:
            parts = 1
        return ours, None if parts is None else Blocks(tokens, parts)

    @cached_property
    def _parts(self) -> tuple[int, int]:
        """Kernel blocks in one of our blocks, and in one of the peer's, as the release booked it.

        As many where no handshake states any (<= 0.20): 0.20 books 1 for every peer.
        """
        worker = self._worker
        is_test = not hasattr(worker, "block_size")  # of vLLM's own, as in `smaller`
        if is_test or not (self._is_known and self._facts.states_kernel_blocks):
            return 1, 1
        booked = worker.transfer_topo.get_engine_info(self._engine_id)
        ours = int(worker._physical_blocks_per_logical_kv_block)
        return ours, int(booked.remote_physical_blocks_per_logical)

    @property
    def _is_cut_alike(self) -> bool:
        ours, theirs = self._parts
        return ours == theirs

    @property
    def _group_tokens(self) -> list[int]:
        """The tokens of a block of ours in each cache group, as the scheduler counts blocks."""
        worker, facts = self._worker, self._facts
        if not facts.has_cache_groups:
            return [int(worker.vllm_config.cache_config.block_size)]
        plan = worker.kv_cache_config
        return [tokens_of_group(plan, facts, number) for number in range(len(self._groups))]

    @cached_property
    def _shares_tokens(self) -> bool:
        """True if ranks of either side share out tokens (decode context parallelism, from 0.29)."""
        if not self._facts.states_context_parallelism:
            return False
        theirs = self._worker.transfer_topo.get_engine_info(self._engine_id).remote_dcp_size
        return bool(self._worker.dcp_size > 1 or theirs > 1)

    @cached_property
    def _has_unlike_regions(self) -> bool:
        """True if the peer's regions are of other cache groups than ours (from 0.30)."""
        if "region_group_ids" not in self._facts.agent_metadata:
            return False
        theirs = self._worker.dst_region_group_ids.get(self._engine_id)
        ours = self._worker.region_group_ids
        return bool(theirs and ours and list(theirs) != list(ours))

    @property
    def _are_paired_otherwise(self) -> bool:
        """True if the release pairs lists of other lengths: by region, or by context ranks."""
        return self._has_unlike_regions or self._shares_tokens

    def choose(self, context: RequestContext) -> None:
        """Names the blocks that the release pairs rightly, or has kvpatch read the request.

        Raises:
            KvpatchError: neither can be; the load fails.
        """
        reader, request, engine_id = self._reader, self._request, self._engine_id
        fills = request is not None and any(request.local_blocks)
        if request is not None and request.is_to_fail:
            raise ReadRefused(
                f"this engine has no content of an image of request {context.request_id}, which it "
                f"cannot load: the prompt in front is not the one that engine {engine_id} holds",
                _ONE_PROMPT,
            )
        if reader is not None and request is not None and self._is_known:
            parts = reader.ours.kernel_blocks_per_block
            refuse_unmapped(self._pages, reader.groups, request, parts)
        if self.smaller is not None:
            self._keep_pairable(*self.smaller)
            return
        peer = None if reader is None else reader.peers.get(engine_id)
        if peer is not None:  # its blocks are paired by token, which tells wrong ones
            if request is None:
                raise ReadRefused(
                    f"request {context.request_id} reads from engine {engine_id} of another "
                    "geometry and carries no token count",
                    _ON_IN_SCHEDULER,
                )
            if fills:  # else a full prefix hit or an abort, of which the release tells P
                read_request.match_local_block_count(self._entry, self._facts)
                context.peer = peer
            return
        # One like us; or one that hands are shaken with now (from 0.32), and the request comes
        # again.
        is_buffered = worker_state(self._worker).is_host_buffered
        if reader is not None and self._is_known and is_buffered and fills:
            raise UnexpectedRead(
                f"request {context.request_id} reads from engine {engine_id}, which has not shaken "
                "hands with the host buffer's reader"
            )
        names_any = any(read_request.groups(self._entry.local_block_ids))
        if not (self._is_known and names_any):
            return
        if self._are_paired_otherwise:
            if self._has_unlike_regions and request is not None:
                self._refuse_part(request.tokens, request.remote_tokens)
            return
        if request is not None and fills:
            if self._is_cut_alike:
                self._leave_common(request)
            else:
                self._refuse_other_ends(request)
        if reader is not None:
            self._refuse_misnamed(reader)

    def name_preparable(self) -> None:
        """Names blocks that have the release prepare a transfer, which is to fail."""
        worker, entry, facts = self._worker, self._entry, self._facts
        if self.smaller is None:
            # Of a like peer whose lists, of other lengths, the release alone pairs, they stay:
            # where they are of one length it may find nothing to read for this rank, prepare no
            # transfer, and take a load that is refused for one that is done.
            is_ours = self._reader is not None and self._engine_id in self._reader.peers
            if not is_ours and self._is_known and self._are_paired_otherwise:
                return
            if is_ours or self._is_cut_alike:
                read_request.match_local_block_count(entry, facts)
                return
            ours, theirs = self._parts
            # 0.21 expands each of P's ids to one, or to as many as one of our blocks has.
            is_by_ours = theirs > 1 and facts.expands_by_own_cut
            ratio = 1.0 if is_by_ours else ours / theirs
        else:
            own, others = self.smaller
            ratio = 1.0 if others is None else own.tokens / others.tokens
        named = []
        local = read_request.groups(entry.local_block_ids)
        for group, blocks in zip(self._groups, local, strict=True):
            length = len(blocks) if group.has_state else math.ceil(len(blocks) * ratio)
            if self._shares_tokens:
                in_front = max(entry.local_num_computed_blocks, default=0) + 1
                length = (length + in_front) * worker.dcp_size
            named.append([0] * length)
        read_request.replace_remote_blocks(entry, named, facts)

    # --- a peer like us -----------------------------------------------------------------

    def _leave_common(self, request: read_request.ReadRequest) -> None:
        """Takes those of P's blocks from a request that lie behind the tokens that D loads.

        P's prompt may be longer. The release pairs the lists of a peer like us from their ends.
        """
        worker, facts, remote, groups = self._worker, self._facts, self._remote, self._groups
        contexts = ReleaseWorker(worker, facts).context_sizes
        drafts = facts.reserves_drafted_blocks and reserves_slots(worker.vllm_config)
        if drafts and not facts.counts_prefix_hits:  # 0.10.0
            return  # both lists may go on behind the prompt, and D's does not tell
        if max(contexts, default=1) > 1 or len(remote) != len(groups):
            return
        parts = worker._physical_blocks_per_logical_kv_block if facts.expands_remote_blocks else 1
        sizes = self._group_tokens
        #: By block size, the blocks of full attention behind these tokens: a window has as many.
        behind = dict.fromkeys(sizes, 0)
        for number, (group, block_tokens) in enumerate(zip(groups, sizes, strict=True)):
            if not group.spans_prompt or not request.local_blocks[number]:
                continue
            blocks = -(-request.tokens // block_tokens)
            if len(remote[number]) < blocks * parts:
                raise UnlikePrompts(
                    f"the request names {len(remote[number]) // parts} blocks of engine "
                    f"{self._engine_id}, and the prompt fills {blocks} here",
                    _ONE_PROMPT,
                )
            if request.hit_tokens is not None:  # with those that D reserves for drafted tokens
                hit = request.hit_tokens // block_tokens
                blocks = max(blocks, hit + len(request.local_blocks[number]))
            behind[block_tokens] = max(behind[block_tokens], len(remote[number]) - blocks * parts)
        if any(behind.values()):
            kept = [
                blocks[: len(blocks) - behind[block_tokens]]
                if group.spans_prompt or group.window_tokens
                else blocks
                for group, blocks, block_tokens in zip(groups, remote, sizes, strict=True)
            ]
            read_request.replace_remote_blocks(self._entry, kept, facts)

    def _refuse_other_ends(self, request: read_request.ReadRequest) -> None:
        """Refuses a request that names blocks of other tokens, unless kernel blocks fit.

        The release pairs kernel blocks, which are alike: from the ends of two lists or, of a model
        with recurrent state, from their beginnings. It ends the engine where there are too few.

        Raises:
            ReadRefused: it would pair other tokens, or ends.
        """
        (ours, theirs), groups = self._parts, self._groups
        local, from_beginning = request.local_blocks, any(group.has_state for group in groups)
        fits = theirs == 1 or not self._facts.expands_by_own_cut
        fits = fits and len(self._remote) == len(local) == len(groups)
        contexts = ReleaseWorker(self._worker, self._facts).context_sizes
        fits = fits and max(contexts[:1], default=1) == 1
        sizes = zip(groups, self._group_tokens, local, self._remote, strict=False)
        for group, block_tokens, filled, named in sizes if fits else ():
            if group.has_state or not filled:
                continue
            theirs_tokens = block_tokens * theirs // ours
            blocks = -(-request.tokens // block_tokens)
            at_peer = -(-request.tokens // theirs_tokens)
            if request.hit_tokens is None:  # the length of D's list says it
                hit = max(blocks - len(filled), 0)
            else:
                hit = request.hit_tokens // block_tokens
            if group.spans_prompt:
                fits = fits and len(named) == at_peer and hit + len(filled) == blocks
            if from_beginning:
                fits = fits and not hit
            else:
                ends_alike = blocks * block_tokens == at_peer * theirs_tokens
                fits = fits and ends_alike and len(filled) * ours <= len(named) * theirs
        if not fits:
            raise ReadRefused(
                f"blocks of engine {self._engine_id} are {theirs} kernel blocks, ours {ours}, and "
                "this vLLM would pair this prompt's with those of other tokens",
                _ONE_BLOCK_SIZE,
            )

    def _refuse_misnamed(self, reader: Reader) -> None:
        """Refuses blocks that the peer does not have, and fewer than are to be filled.

        The release reads the first from another layer's blocks, and asserts the second.
        """
        worker, facts, engine_id = self._worker, self._facts, self._engine_id
        local = read_request.groups(read_request.local_blocks(self._entry, facts))
        blocks = worker.dst_num_blocks.get(engine_id)
        if blocks is None:
            return
        remote = self._remote
        if len(remote) != len(local):
            raise ReadRefused(
                f"the request names blocks of {len(remote)} cache groups of engine {engine_id}, "
                f"and this model has {len(local)}",
                AS_ANSWERED,
            )
        if reader.states:  # pages of states are counted otherwise: the release's to judge
            return
        if "region_num_blocks" in facts.agent_metadata:  # with numbers of their own, from 0.30
            blocks = max((blocks, *(worker.dst_region_num_blocks.get(engine_id) or ())))
        parts = 1 if facts.expands_remote_blocks else reader.ours.kernel_blocks_per_block
        for theirs, ours in zip(remote, local, strict=True):
            last = max(theirs, default=0)
            if (last + 1) * parts > blocks:
                raise ReadRefused(
                    f"the request names block {last} of engine {engine_id}, which has "
                    f"{blocks // parts}",
                    AS_ANSWERED,
                )
            if len(theirs) < len(ours):
                raise ReadRefused(
                    f"the request names {len(theirs)} blocks of engine {engine_id}, and the prompt "
                    f"fills {len(ours)} here",
                    _ONE_PROMPT,
                )

    def _refuse_part(self, *tokens: int) -> None:
        """Refuses a part of P's prompt where the release would pair regions' lists from their ends.

        It pairs them by token only with P's own count, and without regions that groups share.

        Args:
            tokens: to load, and that P holds.
        """
        worker, plan = self._worker, self._worker.kv_cache_config
        groups = range(len(transferred_groups(plan, self._facts)))
        sizes = {tokens_of_group(plan, self._facts, number) for number in groups}
        if all(len({-(-count // block_tokens) for count in tokens}) == 1 for block_tokens in sizes):
            return
        regions = (*worker.dst_region_group_ids[self._engine_id], *worker.region_group_ids)
        if self._entry.remote.num_tokens is None or min(regions) < 0 or self._shares_tokens:
            raise UnlikePrompts(
                f"{tokens[0]} of {tokens[1]} tokens of engine {self._engine_id} are to be loaded, "
                "whose layers are in other cache groups than ours: this vLLM would take the last "
                "blocks",
                "send both engines the same prompt, and pass on remote_num_tokens of P's answer",
            )

    # --- a peer of smaller blocks, which the release reads itself: no reader of ours can ----
    #
    # A list of D's begins behind a prefix hit and one of P's with the prompt, so that the two
    # belong together from the end, and they end in one place only where the prompt fills D's last
    # block. Handed P's blocks from D's first token on, the release pairs them rightly.

    def _keep_pairable(self, ours: Blocks, theirs: Blocks | None) -> None:
        """Leaves those of P's blocks on a request that the release pairs with D's.

        Raises:
            ReadRefused: there are none such.
        """
        entry, request, groups, remote = self._entry, self._request, self._groups, self._remote
        local = read_request.groups(entry.local_block_ids)
        if not any(local):
            return
        if theirs is None:
            raise ReadRefused(
                "this release's handshake does not say into what the peer's blocks are cut, and "
                "ours are",
                _ONE_BLOCK_SIZE,
            )
        if self._shares_tokens:
            # Here the release pairs blocks one to one, and leaves out the rest.
            has_more = any(len(named) > len(own) for own, named in zip(local, remote, strict=False))
            if any(entry.local_num_computed_blocks) or has_more:
                raise ReadRefused(
                    "with context parallelism this vLLM pairs the peer's smaller blocks one to one "
                    "with ours",
                    _ONE_BLOCK_SIZE,
                )
            return
        has_state = any(one.has_state for one in groups)
        is_cached = bool(self._worker.vllm_config.cache_config.enable_prefix_caching)
        kept, of_ours, of_theirs = list(remote), ours, theirs
        plan = self._worker.kv_cache_config if self._facts.has_cache_groups else None
        for number, group in enumerate(groups):
            if group.has_state or not local[number]:
                continue
            if plan is not None:
                sizes = tokens_of_group(plan, self._facts, number), of_ours.tokens
                ours, theirs = of_ours.of_group(*sizes), of_theirs.of_group(*sizes)
            has = self._remote_list(group, remote[number], theirs)
            hit = None if is_cached else 0
            if request is not None and is_cached:
                hit = request.hit_tokens
            if hit is not None and not group.window_tokens:
                first = hit // ours.tokens * ours.tokens
                wanted = BlockList(kernel_blocks(local[number], 1), ours.tokens, first)
            else:
                tokens = _tokens_of(has, ours, has_state) if request is None else request.tokens
                wanted = blocks_to_end(local[number], tokens, ours.tokens)
            if request is not None and wanted.first_token < has.first_token:
                has = _with_let_go(group, remote[number], has, request.tokens)
            found = remote_slice(wanted, has, from_front=ours.parts != theirs.parts and has_state)
            if found is None:
                raise ReadRefused(
                    f"this vLLM would pair the {len(remote[number])} blocks of {theirs.tokens} "
                    f"tokens with the wrong ones of our {len(local[number])} of {ours.tokens}",
                    _ONE_BLOCK_SIZE,
                )
            kept[number] = tuple(has.block_ids[slice(*found)].tolist())
        if tuple(kept) != remote:
            read_request.replace_remote_blocks(entry, kept, self._facts)

    def _remote_list(self, group: Group, named: Sequence[int], theirs: Blocks) -> BlockList:
        """Returns P's list, without blocks that slid out of a window."""
        if not group.window_tokens:
            return BlockList(kernel_blocks(named, 1), theirs.tokens)
        if self._request is None:
            raise _no_count()
        held = -(-self._request.remote_tokens // theirs.tokens)
        return window_end(named, theirs.tokens, 1, held)


def _with_let_go(group: Group, named: Sequence[int], has: BlockList, tokens: int) -> BlockList:
    """Returns P's list with the null blocks for what slid out of a window, if D needs none of it.

    The release pairs them with slots of D's first block that nobody looks at.
    """
    first = has.first_token - (len(named) - has.block_ids.size) * has.block_tokens
    is_unseen = has.first_token <= max(0, tokens - (group.window_tokens or 0) + 1)
    if not group.window_tokens or not is_unseen:
        return has
    return BlockList(kernel_blocks(named, 1), has.block_tokens, first)


def remote_slice(
    local: BlockList, remote: BlockList, *, from_front: bool
) -> tuple[int, int] | None:
    """Returns the part of P's list that the release pairs with D's token by token; None for none.

    Args:
        from_front: True if it pairs lists of unlike lengths from the front (recurrent state and
            blocks cut into unlike parts), and not from the end.
    """
    before, held = local.first_token - remote.first_token, local.end_token - local.first_token
    if before < 0 or before % remote.block_tokens:
        return None
    start = before // remote.block_tokens
    stop = min(remote.block_ids.size, start - -held // remote.block_tokens)
    if stop <= start or ((stop - start) * remote.block_tokens > held and not from_front):
        return None
    return start, stop


def _tokens_of(remote: BlockList, ours: Blocks, has_state: bool) -> int:  # noqa: FBT001
    """Returns up to where P's list reaches, where that tells how many of D's blocks it fills."""
    last = remote.end_token
    # P may leave out the last token of a model with recurrent state.
    least = last - remote.block_tokens + (not has_state)
    if -(-least // ours.tokens) != -(-last // ours.tokens):
        raise _no_count()
    return last


def _no_count() -> ReadRefused:
    return ReadRefused(
        "the request reads from blocks of another size and carries no token count",
        _ON_IN_SCHEDULER,
    )
