"""Has loads checked by the digests that P promises of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvpatch.checks.digests.covered import CoveredCaches
from kvpatch.checks.digests.digest_check import DigestCheck
from kvpatch.checks.digests.digest_read import DigestRead
from kvpatch.checks.digests.digest_table import DigestTable
from kvpatch.checks.digests.load_proof import DigestCounts, LoadProof
from kvpatch.checks.digests.table_digests import DigestStream, TableTokens
from kvpatch.checks.holds.grants import read_promise
from kvpatch.checks.holds.hold_check import HoldCheck
from kvpatch.core.errors import KvpatchError
from kvpatch.geometry.plane import Content
from kvpatch.load.prepared_transfers import RankRead, RequestContext
from kvpatch.load.read_request import DIGEST, ReadRequest
from kvpatch.load.token_pairing import filled_state, loaded_tokens
from kvpatch.observe.catalogue import Proof
from kvpatch.transfer.lifetime import Check
from kvpatch.worker.kv_cache_groups import Group
from kvpatch.worker.local_geometry import LocalGeometry


@dataclass(frozen=True)
class DigestChecks:
    """One worker's.

    Attributes:
        ours: the worker's geometry, and its block tables' layers.
        covered: its caches; None where digests do not cover them.
        table: where peers' digests land.
        counts: what has become of loads.
        is_sample: whether a sample of each is checked.
    """

    ours: LocalGeometry
    groups: tuple[Group, ...]
    covered: CoveredCaches | None
    table: DigestTable
    counts: DigestCounts
    is_sample: bool

    def check_load(self, context: RequestContext, request: ReadRequest) -> None:
        """Has what a load's reads bring compared with what P has, as P and our scheduler say."""
        proof = LoadProof(self.counts, context.request_id)
        context.when_prepared.append(partial(_seal, proof, context))
        stated, covered = request.stated.get(DIGEST), self.covered
        if stated is None or covered is None or not context.is_as_read:
            return
        try:
            promised = read_promise(stated)
            found = [
                covered.table(number, blocks, (first_token, request.tokens))
                for number, blocks, first_token in loaded_tokens(self.ours, self.groups, request)
            ]
        except KvpatchError as error:
            self.counts.doubt("a request", error)
            return
        tables = [table for table in found if table is not None]
        for number, group in enumerate(self.groups):
            blocks = request.local_blocks[number] if group.has_state else ()
            filled = filled_state(blocks)
            if filled is not None:
                tables += covered.states(number, filled)
            elif blocks:
                proof.leave(Proof.UNCHECKED)
        if promised is not None and tables:
            stream = covered.stream
            context.checks.append(partial(self._of_rank, proof, stream, promised, tables))

    def _brings_states_alone(self, rank: RankRead, ranks: int) -> bool:
        """Whether the release reads a rank for its share of states, and latents from another.

        Every rank has all of a latent, and copies need not be the same to the last bit.
        """
        has_states = any(group.has_state for group in self.groups)
        is_of_many = has_states and ranks > self.ours.tp_size
        return is_of_many and rank.number != self.ours.tp_rank * ranks // self.ours.tp_size

    def _of_rank(
        self,
        proof: LoadProof,
        stream: DigestStream,
        promised: Sequence[int],
        loaded: Sequence[TableTokens],
        rank: RankRead,
        before: tuple[Check, ...],
    ) -> DigestCheck | None:
        """Of what is read of one rank; None where nothing checks it, as where it does not hold it.

        Args:
            promised: by rank of P's, where its table of digests begins, masked.
            loaded: what the load fills.
        """
        held = next((check for check in before if isinstance(check, HoldCheck)), None)
        if held is None or rank.mask is None or rank.is_idle:
            return None
        if rank.number >= len(promised):  # others of its ranks may be compared
            proof.leave(Proof.UNCHECKED)
            return None
        filled = [table.without_heads(rank.taken or ()) for table in loaded]
        if rank.taken is None and self._brings_states_alone(rank, len(promised)):
            filled = [table.without_content(Content.LATENT) for table in filled]
        tables = [table for table in filled if table.planes]
        if not tables:
            return None
        is_part = False
        if rank.taken is None and len(promised) > self.ours.tp_size:
            known = [part for table in tables for part in table.without_open_blocks()]
            is_part = sum(table.rows for table in known) < sum(table.rows for table in tables)
            tables = known
        address = promised[rank.number] ^ rank.mask
        fetched = DigestRead(self.table, rank.agent, address, held.generation)
        return DigestCheck(
            fetched,
            tables,
            proof,
            stream,
            is_sample=self.is_sample,
            is_part=is_part,
        )


def _seal(proof: LoadProof, context: RequestContext, is_read: bool) -> None:
    """Books that all reads of a load have been prepared."""
    if context.is_refused:  # a part of it may be on its way, and the load fails
        proof.leave(None)
    proof.seal(is_read=is_read)
