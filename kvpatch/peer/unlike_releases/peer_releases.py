"""Which releases a P may be of, by the names of what it answers and of what it states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import FACTS, Question, ReleaseFacts

#: Those that all releases answer, and that may be false or empty.
_FLAGS = frozenset(("do_remote_prefill", "do_remote_decode", "remote_block_ids"))
#: Of all answers, those fields that some release has.
_FIELDS = frozenset[str]().union(*(facts.answer for facts in FACTS.values()))
#: What a P's words must mean the same in, to be taken for our own release's.
_MEANINGS = ("question", "reader_count", "cache_shape", "names_layouts", "has_cache_groups")
#: The only field that a P which has it may answer null for.
NULLABLE = frozenset(("remote_blocks_expiry_time",))
#: The only one that a P which has it answers 0 for.
_ZERO = "remote_registration_generation"
_MOST_ID = 1024

Releases = tuple[str, ...]


def releases_by_answer(params: Mapping[str, Any]) -> Releases:
    """The releases whose P answers with just these fields; none where a proxy left some out.

    A proxy with types of its own adds null for fields that P did not send, or 0, or an empty text.
    """
    named = _FIELDS & params.keys()
    stated = {n for n in named if params[n] or (n == _ZERO and params[n] is not None)}
    stated |= named & _FLAGS
    fit = {n: f.answer for n, f in FACTS.items() if f.answer - NULLABLE <= stated <= f.answer}
    return tuple(name for name in fit if fit[name] == named) or tuple(fit)


def releases_by_fields(releases: Releases, stated: Iterable[str]) -> Releases:
    """Those of `releases` whose workers state just these fields at a handshake."""
    fields = frozenset(stated)
    return tuple(name for name in releases if FACTS[name].agent_metadata == fields)


def question_of(releases: Releases) -> Question | None:
    """What releases that answer alike want to be asked; None where they do not agree.

    A listener <= 0.11.0 answers whatever it is asked.
    """
    found = {FACTS[name].question for name in releases} - {"at a port"}
    return found.pop() if len(found) == 1 else None


def speak_alike(releases: Releases, own: ReleaseFacts) -> bool:
    """Whether all these releases say what ours says, and mean the same by it."""
    return all(
        own.agent_metadata - _OPTIONAL <= FACTS[name].agent_metadata
        and all(getattr(FACTS[name], fact) == getattr(own, fact) for fact in _MEANINGS)
        for name in releases
    )


#: What releases that have them do without, where a P does not state them.
_OPTIONAL = frozenset(
    ("dcp_size", "pcp_size", "region_num_blocks", "region_group_ids", "region_names")
) | {"region_mem_types", "region_members", "packed_member_layouts", "ple_block_len"}


@dataclass(frozen=True)
class Statement:
    """What a rank of a P of another release has stated, in its own words.

    Attributes:
        releases: that it may be of.
        fields: of its metadata, by name.
    """

    releases: Releases
    fields: Mapping[str, Any]

    @property
    def facts(self) -> ReleaseFacts:
        """Of one of these releases, whose metadata has the same fields."""
        return FACTS[self.releases[-1]]


@dataclass(eq=False)
class PeerReleases:
    """What a scheduler, or a worker, knows of its peers' releases, by engine id."""

    _answers: RecentEngines[Releases] = field(default_factory=RecentEngines)
    _stated: RecentEngines[dict[int, Statement]] = field(default_factory=RecentEngines)

    def learn(self, params: Any) -> None:
        """Books what a request says of the P that it was sent by."""
        if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
            return
        engine_id = params.get("remote_engine_id")
        if isinstance(engine_id, str) and 0 < len(engine_id) <= _MOST_ID:
            self._answers[engine_id] = releases_by_answer(params)

    def of(self, engine_ids: Iterable[str]) -> dict[str, Releases]:
        """By engine, where something is known of it."""
        found = ((engine_id, self._answers.get(engine_id)) for engine_id in engine_ids)
        return {engine_id: releases for engine_id, releases in found if releases}

    def take(self, told: Mapping[str, Releases]) -> None:
        """Books what the scheduler knows."""
        for engine_id, releases in told.items():
            self._answers[engine_id] = releases

    def state(self, engine_id: str, rank: int, statement: Statement | None) -> None:
        """Books what a rank has stated; None for one that speaks as we do."""
        ranks = dict(self._stated.get(engine_id, {}))
        ranks.pop(rank, None)
        if statement is not None:
            ranks[rank] = statement
        self._stated[engine_id] = ranks

    def stated(self, engine_id: str, rank: int) -> Statement | None:
        """What a rank of another release has stated; None of any other."""
        return self._stated.get(engine_id, {}).get(rank)

    @property
    def has_others(self) -> bool:
        """Whether any rank of another release has stated something."""
        return any(self._stated.values())

    def speaks_otherwise(self, engine_id: str) -> Statement | None:
        """What some rank of a P of another release has stated; None of any other P."""
        return next(iter(self._stated.get(engine_id, {}).values()), None)
