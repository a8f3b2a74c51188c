"""The fields that P's kvpatch adds to its side channel's answer, and how D gets them.

A release's handshake has no word for how a CPU's keys lie, nor for the types of recurrent states or
the slots of a ring of keys. One of ``<= 0.20`` does not say all of a block either. P's answer at
its side channel is a map of names, of which each release takes those that it knows: P's kvpatch
adds some. D's release lets go of them, so that D's kvpatch asks once more where it has to know.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Any

from kvpatch.core.errors import PeerRefused
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.peer.agent_metadata import MOST_TOKENS, StatedBlocks
from kvpatch.peer.other_releases import Address, ask, fields_of, question_for
from kvpatch.peer.unstated_blocks import word_of
from kvpatch.worker.envelope import WORDS, message_on
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state
from kvpatch.worker.unpatched_workers import CURE

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: In P's answer: how a CPU's keys lie, and what is in blocks that are no rows of tokens.
KEYS, CONTENTS = "kvpatch_keys", "kvpatch_contents"
#: In P's answer: the layout of what it registers, where vLLM's own mirror would state another, or
#: the release states none (0.10.0).
LAYOUT = "kvpatch_layout"
#: In P's answer, ``<= 0.20``: tokens of a block and of a kernel block, and the type of its items.
BLOCKS, DTYPE = "kvpatch_blocks", "kvpatch_dtype"
_BLOCKS = re.compile(r"([0-9]{1,8})/([0-9]{1,8})")

# --- the side that is read --------------------------------------------------------


def words_of(release: ReleaseWorker, ours: LocalGeometry | None) -> dict[str, str]:
    """Returns what P states beside its release, by name.

    Args:
        ours: what it has registered; None where nobody reads into that.
    """
    order = release.key_order() if release.tiles_on_amx else None
    # D cannot tell kvpatch's host buffer from a mirror.
    is_buffered = worker_state(release.worker).is_host_buffered
    words = {
        KEYS: None if order is None else word_of(order),
        CONTENTS: contents_of(release),
        LAYOUT: release.memory_layout if is_buffered or release.is_where_mirrors_are else None,
    }
    if ours is not None and not release.facts.states_kernel_blocks:
        block_tokens = ours.block_tokens * ours.kernel_blocks_per_block
        words |= {BLOCKS: f"{block_tokens}/{ours.block_tokens}", DTYPE: ours.dtype}
        if not release.facts.states_layout:
            words[LAYOUT] = ours.inner_layout
    return {name: word for name, word in words.items() if word is not None}


def lack_kvpatch(metadata: Mapping[Any, Any]) -> bool:
    """True if a worker has written no words, with an error in the log."""
    found = not all(WORDS in message_on(stated) for stated in metadata.values())
    if found:
        _LOG.error(
            "kvpatch is on in this engine's scheduler and not in all of its workers: prompts that "
            "they may read wrongly are computed. To have these loaded, %s",
            CURE,
        )
    return found


def with_stated_words(metadata: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns what workers state, as their scheduler encodes it for peers: with some names more."""
    # The words are not taken off: a MultiConnector hands them to several.
    words = {rank: message_on(stated).get(WORDS, {}) for rank, stated in metadata.items()}
    return {
        rank: with_names(stated, words[rank]) if words[rank] else stated
        for rank, stated in metadata.items()
    }


def with_names(stated: Any, words: Mapping[str, str]) -> Any:
    """Returns a copy of what a worker states with some names more.

    Args:
        stated: a dataclass of the release's, or ``<= 0.11.0`` a struct of msgspec's.
    """
    kind: Any = type(stated)
    make: Any = make_dataclass
    if is_dataclass(kind):
        names = tuple(one.name for one in fields(kind))
    else:
        import msgspec

        names, make = kind.__struct_fields__, msgspec.defstruct
    with_fields: Any = make(kind.__name__, [(name, str, "") for name in words], bases=(kind,))
    found = with_fields(**{name: getattr(stated, name) for name in names}, **words)
    # What other patches have written onto it, for their own parts of the scheduler.
    vars(found).update({n: v for n, v in vars(stated).items() if n not in names})
    return found


# --- the side that reads ----------------------------------------------------------


@dataclass(eq=False)
class SideChannels:
    """The addresses at which a worker's peers answer, by engine id.

    Attributes:
        warned: the peers that are taken for like engines, of which the log says so.
    """

    found: RecentEngines[Address] = field(default_factory=RecentEngines)
    warned: RecentEngines[None] = field(default_factory=RecentEngines)

    def words(self, engine_id: str, tp_rank: int, facts: ReleaseFacts) -> Mapping[str, object]:
        """Returns a rank's whole answer, by name; empty where it does not answer with a map."""
        import zmq

        address = self.found.get(engine_id)
        if address is None:
            return {}
        if not facts.listens_in_scheduler:  # each rank listens behind the one before
            address = replace(address, port=address.port + tp_rank)
        try:
            payload, *_ = ask(address, question_for(facts.question, tp_rank))
            return fields_of(payload)
        except (PeerRefused, zmq.ZMQError) as error:
            _LOG.warning(
                "engine %.200r was asked for what its kvpatch says of its cache, and is taken for "
                "one without: %s",
                *(engine_id, error),
            )
            return {}


def stated_blocks(words: Mapping[str, object]) -> StatedBlocks | None:
    """Returns what P's kvpatch states of its blocks; None where it states nothing."""
    stated, layout, dtype = (words.get(name) for name in (BLOCKS, LAYOUT, DTYPE))
    if stated is None:
        return None
    found = _BLOCKS.fullmatch(stated) if isinstance(stated, str) else None
    block_tokens, kernel_tokens = map(int, found.groups()) if found else (0, 0)
    if not 0 < kernel_tokens <= block_tokens <= MOST_TOKENS or block_tokens % kernel_tokens:
        raise PeerRefused(
            f"its kvpatch states blocks of {shown(stated)} tokens: expected a number of tokens, "
            "and of a kernel block's, which divides it",
            "use one kvpatch on both sides",
        )
    return StatedBlocks(
        block_tokens,
        kernel_tokens,
        str(layout) if layout in ("HND", "NHD") else None,
        dtype if isinstance(dtype, str) else "",
    )


#: vLLM's spec of a ring of keys. Its blocks' tokens are its slots, as many as the model and the
#: drafted tokens ask for, but of Step5 (0.33), whose slots follow from pages.
_RING = "CircularBufferSpec"


def contents_of(release: ReleaseWorker) -> str | None:
    """Returns the types of a worker's states and the slots of its rings, in words.

    No handshake states them (<= 0.33): of states it has the bytes, which float16 and bfloat16 have
    in common, and of rings nothing. None where no layer has either, and <= 0.17, which has no plan
    of groups.
    """
    if not release.facts.has_cache_groups:
        return None
    types, rings = set[str](), set[int]()
    for layer in release.worker._layer_specs:
        spec = release.spec_of(layer)
        if hasattr(spec, "shapes"):
            types.add(",".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes))
        elif type(spec).__name__ == _RING:
            rings.add(int(spec.block_size))
    words = [f"states of {of}" for of in sorted(types)]
    words += [f"a ring of {slots}" for slots in sorted(rings)]
    return "; ".join(words) or None


def check_contents(ours: str, theirs: object) -> None:
    """Refuses a P whose kvpatch says that its blocks hold something else than ours."""
    if theirs is not None and theirs != ours:
        raise PeerRefused(
            f"blocks that are no rows of tokens hold {ours} here, and {shown(theirs)} at P",
            "give both sides one --mamba-cache-dtype, --mamba-ssm-cache-dtype and --block-size, "
            "and have them draft as many tokens",
        )
