"""Has loads checked by the digests that P promises of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpatch.checks.digests.covered import CoveredCaches
from kvpatch.checks.digests.digest_check import DigestCheck
from kvpatch.checks.digests.digest_read import DigestRead
from kvpatch.checks.digests.digest_table import DigestTable
from kvpatch.checks.digests.load_proof import DigestCounts, LoadProof
from kvpatch.checks.digests.promise import Promise, read_promise
from kvpatch.checks.digests.table_digests import TableTokens
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
class LoadDigest:
    """What one load is checked by.

    Attributes:
        promise: of P's; None where it promises nothing that is known here.
        tables: what is loaded; none where digests do not cover it.
        proof: what becomes of it.
        checks: of the worker.
    """

    promise: Promise | None
    tables: Sequence[TableTokens]
    proof: LoadProof
    checks: DigestChecks

    def of_rank(self, rank: RankRead, before: tuple[Check, ...]) -> DigestCheck | None:
        """Compares what is read of one rank; nothing of one that does not say that it holds it."""
        held = next((check for check in before if isinstance(check, HoldCheck)), None)
        if held is None or rank.mask is None or rank.is_idle:
            return None
        return self.checks.check(self, rank, held.generation, rank.mask)

    def seal(self, *, is_read: bool, is_refused: bool) -> None:
        """Books that all reads of the load have been prepared."""
        if is_refused:  # a part of it may be on its way, and the load fails
            self.proof.leave(None)
        self.proof.seal(is_read=is_read)


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

    def of_load(
        self, context: RequestContext, request: ReadRequest, *, is_as_read: bool
    ) -> LoadDigest:
        """What a request's load is checked by, as P and our own scheduler have it.

        Args:
            is_as_read: whether what is read stays as it is placed.
        """
        proof = LoadProof(self.counts, context.request_id)
        stated = request.stated.get(DIGEST)
        covered = self.covered
        if stated is None or covered is None or not is_as_read:
            return LoadDigest(None, (), proof, self)
        try:
            promise = read_promise(stated)
            found = [
                covered.table(number, blocks, (first_token, request.tokens))
                for number, blocks, first_token in loaded_tokens(self.ours, self.groups, request)
            ]
        except KvpatchError as error:
            self.counts.doubt("a request", error)
            return LoadDigest(None, (), proof, self)
        tables = [table for table in found if table is not None]
        for number, group in enumerate(self.groups):
            blocks = request.local_blocks[number] if group.has_state else ()
            filled = filled_state(blocks)
            if filled is not None:
                tables += covered.states(number, filled)
            elif blocks:
                proof.leave(Proof.UNCHECKED)
        return LoadDigest(promise, tables, proof, self)

    def _brings_states_alone(self, rank: RankRead, ranks: int) -> bool:
        """Whether the release reads a rank for its share of states, and latents from another.

        Every rank has all of a latent, and copies need not be the same to the last bit.
        """
        has_states = any(group.has_state for group in self.groups)
        is_of_many = has_states and ranks > self.ours.tp_size
        return is_of_many and rank.number != self.ours.tp_rank * ranks // self.ours.tp_size

    def check(
        self, load: LoadDigest, rank: RankRead, generation: int, mask: int
    ) -> DigestCheck | None:
        """Of what is read of one rank; None where nothing checks it."""
        promise, covered = load.promise, self.covered
        if promise is None or covered is None or not load.tables:
            return None
        if rank.number >= len(promise.tables):  # others of its ranks may be compared
            load.proof.leave(Proof.UNCHECKED)
            return None
        filled = [table.without_heads(rank.taken or ()) for table in load.tables]
        if rank.taken is None and self._brings_states_alone(rank, len(promise.tables)):
            filled = [table.without_content(Content.LATENT) for table in filled]
        tables = [table for table in filled if table.planes]
        if not tables:
            return None
        is_part = False
        if rank.taken is None and len(promise.tables) > self.ours.tp_size:
            known = [part for table in tables for part in table.without_open_blocks()]
            is_part = sum(table.rows for table in known) < sum(table.rows for table in tables)
            tables = known
        address = promise.tables[rank.number] ^ mask
        fetched = DigestRead(self.table, rank.agent, address, generation)
        return DigestCheck(
            fetched,
            tables,
            load.proof,
            covered.stream,
            is_sample=self.is_sample,
            is_part=is_part,
        )
