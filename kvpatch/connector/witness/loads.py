"""What a scheduler tells its workers of loads to witness: where the last token of each lies.

After a full load the scheduler has D compute the prompt's last token, because a token is sampled
from what that leaves. Only then does a worker know nothing but what P has sent of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpatch.connector import read_request
from kvpatch.connector.local.kv_cache_groups import transferred_groups
from kvpatch.connector.read_request import PlannedLoads
from kvpatch.connector.state import scheduler_state
from kvpatch.core import settings
from kvpatch.core.releases import ReleaseFacts

_LOADS = "kvpatch_witnessed_loads"

STOPPED_EARLIER = "P stops before the last token"
SEVERAL_TOKENS = "D computes several tokens of it"
RESUMED = "the request was resumed"
ENDED = "the request ended before it ran"
ALONE = "the last token is all that is loaded"
NO_PLACE = "the last token has no place in the request's blocks"


class Load(NamedTuple):
    """A full load whose last token is computed in a step; or why it is none.

    Attributes:
        position: of that token.
        last_blocks: by cache group the block that holds it.
        blocks: of the first cache group, those that were filled.
        cause: why it cannot be witnessed; empty where it can.
    """

    request_id: str
    engine_id: str
    position: int
    last_blocks: tuple[int, ...]
    blocks: tuple[int, ...]
    cause: str


class ExpectedLoads:
    """Of one scheduler: the loads that have been asked for, until their requests first run."""

    def __init__(self) -> None:
        self.is_on = settings.witness() != "off"
        self._loads: dict[str, Load] = {}

    @property
    def are_open(self) -> bool:
        """Whether some have been asked for whose requests have not run yet."""
        return bool(self._loads)

    def expect(
        self, scheduler: Any, waiting: Mapping[str, Any], metadata: Any, facts: ReleaseFacts
    ) -> None:
        """Books what a step's metadata asks the workers to load.

        Args:
            waiting: the scheduler's own record of requests to receive, by request id, taken
                before it was cleared; each value starts with the request.
        """
        for request_id, entry in metadata.reqs_to_recv.items():
            blocks = read_request.groups(entry.local_block_ids)
            if not any(blocks):
                continue  # P is told, and nothing is loaded
            request = waiting[request_id][0]
            tokens, _ = read_request.loaded_tokens(
                scheduler, request, facts, scheduler_state(scheduler).of(PlannedLoads)
            )
            prompt = int(request.num_prompt_tokens)
            engine_id = read_request.engine_of(entry, facts)
            cause = "" if tokens == prompt else STOPPED_EARLIER
            self._loads[request_id] = Load(
                request_id, engine_id, prompt - 1, (), tuple(blocks[0]), cause
            )

    def tell(self, scheduler: Any, step: Any, metadata: Any, facts: ReleaseFacts) -> None:
        """Writes those that run, or are over, in a step onto what its workers are told."""
        if not self._loads or step is None:
            return
        found = [
            _placed(self._loads.pop(new.req_id), new, step, scheduler, facts)
            for new in step.scheduled_new_reqs
            if new.req_id in self._loads
        ]
        for cause, names in ((RESUMED, step.num_scheduled_tokens), (ENDED, step.finished_req_ids)):
            over = self._loads.keys() & set(names or ())
            found += [self._loads.pop(name)._replace(cause=cause) for name in over]
        if found:
            setattr(metadata, _LOADS, [tuple(load) for load in found])


def has_loads(metadata: Any) -> bool:
    """Whether a step's metadata has any; in few steps."""
    return hasattr(metadata, _LOADS)


def loads_in(metadata: Any) -> list[Load]:
    """What a step's metadata has of them; none in most steps."""
    return [Load(*told) for told in getattr(metadata, _LOADS, ())]


def _placed(load: Load, new: Any, step: Any, scheduler: Any, facts: ReleaseFacts) -> Load:
    """A load with where its last token lies, as its request first runs."""
    if load.cause:
        return load
    is_last_alone = (
        int(new.num_computed_tokens) == load.position
        and int(step.num_scheduled_tokens[new.req_id]) == 1
    )
    if not is_last_alone:
        return load._replace(cause=SEVERAL_TOKENS)
    tables = read_request.groups(new.block_ids)
    sizes = _tables_of(scheduler, facts)
    if len(sizes) == 1 == len(load.blocks) and load.position % sizes[0][1] == 0:
        # Nothing of such a load is left, and one that has failed looks no other way.
        return load._replace(cause=ALONE)
    places = [
        (tables[group] if group < len(tables) else (), load.position // tokens)
        for group, tokens in sizes
    ]
    if not all(place < len(table) for table, place in places):
        return load._replace(cause=NO_PLACE)
    return load._replace(last_blocks=tuple(table[place] for table, place in places))


def _tables_of(scheduler: Any, facts: ReleaseFacts) -> Sequence[tuple[int, int]]:
    """(number of its table, tokens of a block) of each group whose blocks are transferred."""
    if not facts.has_cache_groups:
        return ((0, int(scheduler.block_size)),)
    plan = scheduler.kv_cache_config
    numbers = {id(group): number for number, group in enumerate(plan.kv_cache_groups)}
    return tuple(
        (numbers[id(group)], int(group.kv_cache_spec.block_size))
        for group in transferred_groups(plan, facts)
    )
