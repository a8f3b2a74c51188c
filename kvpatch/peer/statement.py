"""Fills in what handshakes leave open of a peer's blocks, on both sides.

P's kvpatch states it, or the handshake does, or the operator declares it, in this order. What is
still open is taken for ours, and named: such a peer is a like engine, or it is refused.

A handshake of ``<= 0.20`` does not say all of a block. None says how a CPU's keys lie (by column,
or in tiles where the processor has AMX), nor the types of recurrent states or the slots of a ring
of keys. P's answer at its side channel is a map of names, of which each release takes those that it
knows: P's kvpatch adds some. D's release lets go of them, so that D's kvpatch asks once more where
it has to know.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.geometry.dimension_order import KeyOrder
from kvpatch.geometry.layout_strides import TILED_CHANNELS, TILED_TOKENS
from kvpatch.peer.agent_metadata import MOST_TOKENS, AgentMetadata, StatedBlocks
from kvpatch.peer.block_shapes import heads_of, kv_split_of_peer
from kvpatch.peer.other_releases import Address, ask, fields_of, question_for
from kvpatch.peer.remote_geometry import tokens_in_bytes
from kvpatch.worker.envelope import WORDS, message_on
from kvpatch.worker.local_geometry import LocalGeometry
from kvpatch.worker.release_worker import ReleaseWorker
from kvpatch.worker.state import worker_state
from kvpatch.worker.unpatched_workers import CURE

_LOG = logging.getLogger("kvpatch.unlike_engines")

#: The layout that 0.10.0, which states none, gives every NixlConnector unless told otherwise.
_UNTOLD_LAYOUT = "HND"
#: By the words that settings and peers have for them.
BY_WORD = {"columns": KeyOrder.COLUMN_MAJOR, "tiles": KeyOrder.TILED}
_WORDS = {order: word for word, order in BY_WORD.items()}

#: Of an element, where a CPU's keys are in tiles on no processor; and where AMX may have them so.
_UNTILED_BYTES, _TILED_BYTES = 4, 2

#: In P's answer: how a CPU's keys lie, and what is in blocks that are no rows of tokens.
KEYS, CONTENTS = "kvpatch_keys", "kvpatch_contents"
#: In P's answer: the layout of what it registers, where vLLM's own mirror would state another, or
#: the release states none (0.10.0).
LAYOUT = "kvpatch_layout"
#: In P's answer, ``<= 0.20``: tokens of a block and of a kernel block, and the type of its items;
#: the type alone where P does not read into its cache itself (<= 0.12).
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
    if not release.facts.states_hash:
        words[DTYPE] = release.cache_dtype
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


def check_dtype(ours: str, theirs: object) -> None:
    """Refuses a P whose kvpatch says that its keys and values are of another type than ours."""
    if theirs and ours and theirs != ours:
        raise PeerRefused(
            f"its keys and values are of {shown(theirs)}, ours of {ours}",
            "use one --dtype and --kv-cache-dtype on both sides",
        )


# --- what is open, and how it is filled in ------------------------------------------------


@dataclass(frozen=True)
class DeclaredGeometry:
    """The geometry that the operator declares of peers that do not say it; None for nothing.

    Attributes:
        block_tokens: of ``KVPATCH_PEER_BLOCK_SIZE``.
        layout: of ``KVPATCH_PEER_LAYOUT``.
        keys: of ``KVPATCH_PEER_KEYS``.
    """

    block_tokens: int | None = None
    layout: str | None = None
    keys: KeyOrder | None = None


def declared_geometry() -> DeclaredGeometry:
    """Reads it from this process's environment."""
    keys = BY_WORD.get(settings.peer_keys() or "")
    return DeclaredGeometry(settings.peer_block_size(), settings.peer_layout(), keys)


@dataclass(frozen=True)
class Completed:
    """A peer's metadata with what it left open filled in.

    Attributes:
        is_open: True if some of it is taken for ours.
        is_like: False if what is taken for ours cannot be, or is not what vLLM chooses by itself.
        variables: that would say what is taken for ours.
    """

    peer: AgentMetadata
    variables: tuple[str, ...] = ()
    is_like: bool = True

    @property
    def is_open(self) -> bool:
        """True if the blocks are like ours only where P is like this engine."""
        return any(name != settings.PEER_KEYS for name in self.variables)


def leaves_open(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if P's kvpatch has to be asked what its blocks are."""
    if peer.form is not None or peer.releases:
        return False
    sizes = ours.kernel_sizes
    may_cut = peer.kernel_blocks_per_block is None and (sizes is None or sizes.cuts_some)
    return peer.block_tokens is None or ours.misreads_blocks or may_cut


def complete(ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry) -> Completed:
    """Fills in what a peer's metadata leaves open."""
    variables, is_like = list[str](), True
    if ours.misreads_blocks and peer.form is None:
        peer = replace(peer, block_tokens=None)
    if peer.layout is None and kv_split_of_peer(ours, peer) == "apart":
        peer = replace(peer, layout="NHD")  # as kvcached's are, with keys and values apart
    stated = peer.stated_blocks
    if stated is not None:
        check_dtype(ours.dtype, stated.dtype)
    says_tokens = peer.block_tokens is not None
    if not says_tokens:  # <= 0.11.0, where items may differ in size
        peer = replace(peer, block_tokens=tokens_in_bytes(ours, peer))
    if stated is not None:
        if peer.block_tokens != stated.kernel_tokens:
            raise PeerRefused(
                f"its kvpatch states kernel blocks of {stated.kernel_tokens} tokens, and its "
                f"handshake comes to {peer.block_tokens}",
                "use one model, --dtype, --kv-cache-dtype, vLLM and kvpatch on both sides",
            )
        peer = replace(
            peer,
            kernel_blocks_per_block=stated.block_tokens // stated.kernel_tokens,
            layout=stated.layout if peer.layout is None else peer.layout,
        )
    elif not says_tokens:  # no block is cut
        peer = replace(peer, kernel_blocks_per_block=1)
        variables += [settings.PEER_BLOCK_SIZE] * (declared.block_tokens is None)
    elif peer.kernel_blocks_per_block is None:  # 0.11.1 to 0.20: a backend may cut blocks
        own, cuts = ours.kernel_blocks_per_block, _possible_cuts(ours, peer, declared)
        if len(cuts) != 1:
            variables.append(settings.PEER_BLOCK_SIZE)
            is_like = not cuts or own in cuts
        if cuts:
            peer = replace(peer, kernel_blocks_per_block=own if own in cuts else cuts[0])
    _, heads = heads_of(ours.total_heads, peer.tp_rank, peer.tp_size)
    is_open = peer.layout is None and heads > 1 and (peer.block_tokens or 2) > 1  # 0.10.0
    if is_open and ours.key_order is KeyOrder.ROW_MAJOR and ours.has_heads:
        peer = replace(peer, layout=declared.layout)
        if declared.layout is None:
            variables.append(settings.PEER_LAYOUT)
            is_like = is_like and ours.inner_layout == _UNTOLD_LAYOUT
    wanted, tokens, parts = declared.block_tokens, peer.block_tokens, peer.kernel_blocks_per_block
    if wanted is not None and tokens is not None:
        is_wanted = wanted % tokens == 0 if parts is None else wanted == tokens * parts
        if not is_wanted:
            raise _not_as_declared(declared, f"blocks of {tokens * (parts or 1)} tokens")
    if declared.layout is not None and peer.inner_layout not in (None, declared.layout):
        raise PeerRefused(
            f"{settings.PEER_LAYOUT} declares {declared.layout} and its handshake says "
            f"{peer.layout}",
            "set it to what P has, or unset it",
        )
    peer = _with_key_order(ours, peer, declared.keys)
    is_by_column = ours.key_order is not KeyOrder.ROW_MAJOR
    is_cpus = is_by_column and peer.backend in (None, ours.backend)
    if peer.key_order is None and is_cpus and may_be_tiled(ours, peer):
        variables.append(settings.PEER_KEYS)
    return Completed(peer, tuple(variables), is_like)


def _possible_cuts(
    ours: LocalGeometry, peer: AgentMetadata, declared: DeclaredGeometry
) -> tuple[int, ...]:
    """Returns how many kernel blocks a peer's block may be cut into; none where nobody knows."""
    tokens, wanted = peer.block_tokens or ours.block_tokens, declared.block_tokens
    if ours.kernel_sizes is None:
        return () if wanted is None or wanted % tokens else (wanted // tokens,)
    every = ours.kernel_sizes.parts(tokens)
    # It counts kernel blocks, so many to a block.
    parts = tuple(n for n in every if peer.blocks % n == 0) or every
    found = tuple(n for n in parts if wanted in (None, n * tokens))
    if not found:
        raise _not_as_declared(declared, f"kernel blocks of {tokens} tokens")
    return found


def _not_as_declared(declared: DeclaredGeometry, found: str) -> PeerRefused:
    return PeerRefused(
        f"{settings.PEER_BLOCK_SIZE} declares blocks of {declared.block_tokens} tokens, and its "
        f"handshake comes to {found}",
        "set it to the --block-size of P, or unset it",
    )


# --- a CPU's keys ---------------------------------------------------------------------


def _with_key_order(
    ours: LocalGeometry, peer: AgentMetadata, declared: KeyOrder | None
) -> AgentMetadata:
    """Returns a peer whose block size is known with its key order, where it has the CPU backend.

    The order is left open where nobody states it and our backend is the CPU's as well: the release
    reads like blocks.
    """
    by_form = peer.key_order  # of another backend than ours; else it has ours
    if (by_form or ours.key_order) is KeyOrder.ROW_MAJOR:
        return peer
    if peer.backend not in (None, ours.backend):  # rows, which the release reorders for a CPU
        return peer
    if ours.item_bytes not in (_UNTILED_BYTES, _TILED_BYTES):
        return peer
    if not may_be_tiled(ours, peer):
        return replace(peer, key_order=KeyOrder.COLUMN_MAJOR)
    found = peer.stated_keys or declared
    if None not in (declared, peer.stated_keys) and declared is not peer.stated_keys:
        raise PeerRefused(
            f"{settings.PEER_KEYS} declares {word_of(declared)} and P has keys in "
            f"{word_of(peer.stated_keys)}",
            "set it to what P has, or unset it",
        )
    if found is None and by_form is not None:
        raise PeerRefused(
            "a CPU with AMX has keys and values of bfloat16 in tiles, one without has keys by "
            "column, and the handshake does not say which P is",
            "set KVPATCH_PEER_KEYS to what P has (tiles with AMX, columns on other x86 "
            "processors), set ENABLE_KVPATCH on P, or use --dtype float32",
        )
    if found is KeyOrder.TILED and any(width % TILED_CHANNELS for width in _widths(ours)):
        raise PeerRefused(
            f"heads of some layers have no multiple of {TILED_CHANNELS} channels, and are in no "
            "tiles",
            "use --dtype float32",
        )
    return replace(peer, key_order=found)


def check_key_order(ours: LocalGeometry, peer: AgentMetadata) -> None:
    """Refuses a heterogeneous peer in whose blocks keys lie in an order that is not known."""
    is_known = peer.key_order is not None or ours.item_bytes == _UNTILED_BYTES
    if ours.key_order is KeyOrder.ROW_MAJOR or is_known:
        return
    if ours.item_bytes != _TILED_BYTES:
        raise PeerRefused(
            f"how a CPU lays out keys of {ours.item_bytes} bytes depends on its processor, and the "
            "handshake does not say so",
            "use --kv-cache-dtype auto, or one block size on both sides",
        )
    raise PeerRefused(
        "a CPU with AMX tiles keys and values of bfloat16 where the block size allows, and the "
        "handshake does not say whether P has it",
        "set KVPATCH_PEER_KEYS to what P has (tiles with AMX, columns on other x86 processors), "
        "set ENABLE_KVPATCH on P, or use --dtype float32, or one block size on both sides",
    )


def word_of(order: KeyOrder | None) -> str | None:
    """Returns what peers are told of keys whose order a processor chooses; None for any other."""
    return _WORDS.get(order) if order else None


def order_of(word: object) -> KeyOrder | None:
    """Returns the order that a peer's word names; None of words that only a newer kvpatch knows."""
    return BY_WORD.get(word) if isinstance(word, str) else None


def may_be_tiled(ours: LocalGeometry, peer: AgentMetadata) -> bool:
    """True if a processor with AMX would have a peer's blocks in tiles."""
    return (
        ours.tiles_on_amx
        and ours.item_bytes == _TILED_BYTES
        and (peer.block_tokens or TILED_TOKENS) % TILED_TOKENS == 0
        and any(width % TILED_CHANNELS == 0 for width in _widths(ours))
    )


def _widths(ours: LocalGeometry) -> set[int]:
    return {plane.counts.channels for layer in ours.layers.values() for plane in layer.planes}
