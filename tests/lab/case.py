"""What a lab run is asked to do, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .odd_strides import ODD
from .states import MODELS as STATES
from .states import OF_KINDS, States

Family = Literal["flash", "flashinfer", "cpu", "mla", "triton", "pallas", "b12x", "aiter"]
Allocation = Literal[
    "plain",
    "shared_tensors",
    "split_half",
    "contiguous",
    # The release's own: one tensor of all layers (enable_cross_layers_blocks, 0.18 to 0.28).
    "all_layers",
    # kvcached's own code lays these out, over memory of which only used pages are there.
    "kvcached_rows",
    "kvcached_apart",
    # As no backend asks for them, see odd_strides.
    "pool",
    "permuted",
    "padded",
    "uneven",
]
#: vLLM's names for where states are kept.
StateMode = Literal["none", "align", "all"]
Outcome = Literal["identical", "corrupt", "refused", "failed"]

#: Of the longest request of a model with recurrent state.
STATE_TOKENS = 512

#: Of kinds of layers whose blocks are not as large as the engine's (layer_kinds.py).
OWN_BLOCK_TOKENS = {"window of latents": 64, "compressor": 4, "ring": 8}

#: kvpatch's variable; the lab's engines have "same" where they do not say otherwise.
PEER_BLOCK_SIZE = "KVPATCH_PEER_BLOCK_SIZE"
PEER_KEYS = "KVPATCH_PEER_KEYS"
PEER_LAYOUT = "KVPATCH_PEER_LAYOUT"

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


#: The device whose tensors have no storage (a stand-in).
STORAGELESS = "xla"
#: torch_xla's own CPU, where it is installed: as vLLM's platform calls a device of torch_xla's.
XLA = "tpu"
#: A device of which a release mirrors the whole cache in host memory (from 0.10.2).
MIRRORED = "xpu"


@dataclass(frozen=True)
class EngineSpec:
    """One engine: its cache geometry, and whether kvpatch is on.

    `family` names an attention backend, not a shape: the shape is the one the
    release's own class of that backend gives. FlashAttention is
    ``[2, B, N, H, D]`` <= 0.22, ``[B, 2, N, H, D]`` from 0.23 to 0.25 and
    packed ``[B, H, N, 2D]`` from 0.26 on; FlashInfer has K and V inside a
    block wherever they are not packed.

    `layout` is "NHD" or "HND"; from 0.29 on also one of vLLM's six names.
    """

    family: Family = "flash"
    layout: str = "HND"
    block_tokens: int = 16
    planned_blocks: int = 32
    #: Into how many kernel blocks the backend cuts each of them.
    parts: int = 1
    #: Blocks that the tensors really hold; None for as many as planned.
    tensor_blocks: int | None = None
    layers: int = 2
    kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "bfloat16"
    tp_size: int = 1
    #: Whether these are stages of a pipeline, of one rank each: each has as many of the layers.
    has_stages: bool = False
    #: Of how many of its ranks each has a share of a block's tokens (decode context parallelism);
    #: what these are the lab does not compare.
    contexts: int = 1
    allocation: Allocation = "plain"
    #: Distinct tensors behind the layers when they share (``shared_tensors``).
    tensors: int = 1
    #: The sliding window in tokens of each layer, by turns; 0 for full attention.
    #: Any window makes the release's own hybrid allocator plan several cache
    #: groups over shared tensors, and its own scheduler hand out their blocks.
    window_tokens: tuple[int, ...] = (0,)
    #: The window of the tokens that a request has generated, in a model that looks at all of its
    #: prompt (R-SWA, from 0.25); 0 in another model.
    reference_window: int = 0
    #: KV heads and channels of layers with a window, where they are others. The release plans
    #: blocks of more tokens for the smaller ones of both, so that blocks have one size in bytes.
    window_shape: tuple[int, int] | None = None
    #: The same of layers with full attention, where the model states the heads of the windows.
    full_shape: tuple[int, int] | None = None
    #: Whether such blocks have one number of tokens instead, and unlike bytes: so plans the
    #: release from 0.29 on where blocks are outermost, each group's pages side by side.
    packs_pages: bool = False
    #: Whether every other layer has recurrent state (Mamba2) in place of keys and values, in
    #: blocks of as many bytes.
    has_state: bool = False
    #: The kind of it (states.py).
    state_kind: str = "mamba2"
    #: Of the states, where it is another than that of keys and values (vLLM >= 0.27).
    state_dtype: str = ""
    #: Where the prefix cache keeps states: nowhere, so that there is no such cache, at some
    #: blocks' ends, or at all.
    state_mode: StateMode = "none"
    #: Drafts of a step, for each of which it has a block with the state behind it.
    drafted_states: int = 0
    #: Slots of a ring of keys; as many as its kind has where it is 0.
    ring_tokens: int = 0
    #: Of the only block of recurrent state that a request has: the longest request.
    state_tokens: int = STATE_TOKENS
    #: Whether the first layer is such a one, and not the second.
    state_first: bool = False
    #: Whether its processor has AMX, by the release's own question: the CPU backend's tensors are
    #: then packed as its kernels for that pack them (a stand-in, kinds.py).
    amx: bool = False
    #: Layers behind the others that have no cache of their own, and look at the first one's.
    sharing_layers: int = 0
    #: Whether AITER's FlashAttention shuffles keys and values, by the release's own variable.
    shuffles: bool = False
    #: Whether every other layer is an indexer's cache (DeepSeek-V3.2), whose blocks hold all
    #: values and then all scales, beside latents of MLA.
    has_indexer: bool = False
    #: The kinds of layers by turns (layer_kinds.py); empty where all are the family's, and "" for
    #: one that is.
    kinds: tuple[str, ...] = ()
    #: KV heads of a draft model, and channels: FlashAttention's, in the last layer, which has the
    #: block table of the others.
    draft_shape: tuple[int, int] | None = None
    #: Whether some of these have a block table of their own.
    has_own_tables: bool = False
    #: Prompt tokens that one step computes at most (chunked prefill).
    step_tokens: int = 2048
    #: Slots behind the prompt that the scheduler reserves for drafted tokens.
    lookahead_tokens: int = 0
    #: Whether the release's own scheduler hands out blocks where there is one group, too.
    own_scheduler: bool = False
    #: Tokens of every answer: of P's that D reads, one in all that proxies ask for.
    answer_tokens: int = 1
    #: The answer's token that ends it, where it is not its length; 0 for none.
    stops_after: int = 0
    #: Whether a step is scheduled before the tokens of the last one are known.
    schedules_ahead: bool = False
    #: What becomes of a request whose load failed; empty for the release's own default.
    load_failure_policy: str = ""
    #: Whether the connector is one of a MultiConnector's.
    in_multi: bool = False
    #: Whether an OffloadingConnector beside it in the MultiConnector stores its blocks.
    stores_blocks: bool = False
    #: What the platform calls its device; empty for what the release can take for a CPU.
    device: str = ""
    #: Whether no element is a NaN, of which XLA makes one.
    holds_numbers: bool = False
    patched: bool = False
    #: kvpatch slugs to switch on; empty for all.
    patches: tuple[str, ...] = ()
    #: Whether its workers have no kvpatch all the same, as in processes without the variable.
    stock_workers: bool = False
    #: kvpatch's variables, as (name, value).
    settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {sorted(ITEM_BYTES)}")
        if self.patches and not self.patched:
            raise ValueError("patches are named but patched is False")
        if self.kv_heads % self.tp_size and self.tp_size % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads do not divide over TP {self.tp_size}")
        if self.layout in ("LHBNC", "BHLNC") and (
            self.has_state or self.window_shape or self.full_shape or self.draft_shape
        ):
            raise ValueError(f"vLLM takes no {self.layout} for blocks of several shapes")
        cuts = self.lookahead_tokens or self.step_tokens != 2048 or self.answer_tokens != 1
        if self.block_tokens % self.parts:
            raise ValueError(f"blocks of {self.block_tokens} tokens cut into {self.parts}")
        if not self.has_core and cuts:
            raise ValueError("only the release's own scheduler cuts prompts and drafts tokens")

    def on(self) -> EngineSpec:
        """The same engine with kvpatch."""
        return replace(self, patched=True)

    @property
    def is_tiled(self) -> bool:
        """Whether the CPU backend has keys and values in tiles."""
        whole = self.block_tokens % 32 == 0 and self.head_dim % 32 == 0
        return self.family == "cpu" and self.amx and self.dtype == "bfloat16" and whole

    @property
    def is_told(self) -> bool:
        """Whether its kvpatch is told what blocks P has."""
        return any(name == PEER_BLOCK_SIZE for name, _ in self.settings)

    @property
    def is_mirrored(self) -> bool:
        """Whether vLLM's own host buffer is what is registered."""
        return self.device == MIRRORED and ("KVPATCH_HOST_BUFFER", "always") not in self.settings

    @property
    def blocks(self) -> int:
        return self.planned_blocks if self.tensor_blocks is None else self.tensor_blocks

    @property
    def is_kvcacheds(self) -> bool:
        """Whether kvcached allocates, or tensors are laid out as it does."""
        return self.allocation not in ("plain", "shared_tensors", "all_layers", *ODD)

    @property
    def is_hybrid(self) -> bool:
        return self.has_state or self.has_own_tables or any(self.window_tokens)

    @property
    def states(self) -> States:
        """What every other layer has, where these have recurrent state."""
        return STATES[self.state_kind]

    def states_of(self, layer: int) -> States:
        return OF_KINDS.get(self.kind_of(layer), self.states)

    def is_state(self, layer: int) -> bool:
        is_other = self.has_state and layer % 2 == (0 if self.state_first else 1)
        return is_other or self.kind_of(layer) in OF_KINDS

    @property
    def keeps_states(self) -> bool:
        return self.has_state or not OF_KINDS.keys().isdisjoint(self.kinds)

    @property
    def has_core(self) -> bool:
        """Whether the release's own scheduler hands out blocks."""
        return self.is_hybrid or self.own_scheduler

    def is_indexer(self, layer: int) -> bool:
        return self.has_indexer and layer % 2 == 1

    def kind_of(self, layer: int) -> str:
        """The kind of a layer; empty where it is its family's."""
        return self.kinds[layer % len(self.kinds)] if self.kinds else ""

    def is_draft(self, layer: int) -> bool:
        return self.draft_shape is not None and layer == self.layers - 1

    @property
    def mixes_kinds(self) -> bool:
        """Whether the release plans layers of several kinds, or of another than the family's."""
        return self.has_indexer or bool(self.kinds) or self.draft_shape is not None

    @property
    def is_placed(self) -> bool:
        """Whether the release itself lays out its plan, from 0.29 on, in shapes of its own."""
        return self.has_state or self.packs_pages or self.mixes_kinds or self.has_slots

    @property
    def has_slots(self) -> bool:
        """Whether a block has a slot for keys and one for values, from 0.29 on."""
        return self.family == "b12x" or self.shuffles

    @property
    def attention_layer(self) -> int:
        """The first layer that is its family's."""
        if self.kinds:
            return next(n for n in range(self.layers) if not self.kind_of(n))
        return int(self.has_state and self.state_first)

    def window_of(self, layer: int) -> int:
        """The sliding window of a layer in tokens; 0 for full attention."""
        return self.window_tokens[layer % len(self.window_tokens)]

    def other_shape_of(self, layer: int) -> tuple[int, int] | None:
        """KV heads of all ranks, and channels, of a layer that has others than the model states."""
        if self.is_draft(layer):
            return self.draft_shape
        return self.window_shape if self.window_of(layer) else self.full_shape

    def shape_of(self, layer: int) -> tuple[int, int]:
        """KV heads of a rank, and channels, of a layer."""
        other = self.other_shape_of(layer)
        if other is None:
            return self.heads_per_rank, self.head_dim
        heads, channels = other
        return max(1, heads // self.tp_size), channels

    def block_tokens_of(self, layer: int) -> int:
        if self.is_state(layer):
            return self.state_tokens if self.state_mode == "none" else self.block_tokens
        if self.kind_of(layer) == "ring" and self.ring_tokens:
            return self.ring_tokens
        if self.kind_of(layer):
            return OWN_BLOCK_TOKENS.get(self.kind_of(layer), self.block_tokens)
        if self.packs_pages or self.draft_shape is not None:
            return self.block_tokens
        most = max(math.prod(self.shape_of(other)) for other in range(self.layers))
        return self.block_tokens * most // math.prod(self.shape_of(layer))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def state_item_bytes(self) -> int:
        return ITEM_BYTES[self.state_dtype or self.dtype]

    @property
    def head_ranks(self) -> int:
        """Ranks that share out a layer's heads."""
        return 1 if self.has_stages else self.tp_size

    def layers_of(self, rank: int) -> range:
        """The layers that `rank` has: a stage's, or all."""
        if not self.has_stages:
            return range(self.layers)
        count = self.layers // self.tp_size
        return range(rank * count, (rank + 1) * count)

    @property
    def heads_per_rank(self) -> int:
        """KV heads of one tensor-parallel rank; MLA has one latent everywhere."""
        return 1 if self.family == "mla" else max(1, self.kv_heads // self.head_ranks)

    def first_head(self, rank: int, layer: int = 0) -> int:
        """The global index of the first head that `rank` holds (heads replicate)."""
        other = self.other_shape_of(layer)
        if other is not None:
            return rank * other[0] // self.tp_size
        if self.family == "mla":
            return 0
        return rank % self.head_ranks * self.kv_heads // self.head_ranks

    def kernel_blocks(self, blocks: Sequence[int], layer: int = 0) -> list[int]:
        """A layer's tensors' own blocks of those that the scheduler hands out."""
        if self.is_state(layer):
            return list(blocks)
        return [self.parts * block + part for block in blocks for part in range(self.parts)]

    def content_of(self, layer: int) -> int:
        """Layers with one tensor between them hold one content."""
        return layer % self.tensors if self.allocation == "shared_tensors" else layer


@dataclass(frozen=True)
class Case:
    """A prompt (or several at once) computed by P and taken over by D."""

    name: str
    prefill: EngineSpec
    decode: EngineSpec
    prompt_tokens: int = 40
    #: Tokens that D's own prefix cache holds: whole D blocks, or all of them.
    prefix_hit_tokens: int = 0
    n_requests: int = 1
    #: Of a prompt that goes before, with no hit; 0 for none. See :meth:`behind_another`.
    tokens_before: int = 0

    def __post_init__(self) -> None:
        hit, block_tokens = self.prefix_hit_tokens, self.decode.block_tokens
        if not 0 <= hit <= self.prompt_tokens or hit % block_tokens:
            raise ValueError(f"{self.name}: a hit of {hit} tokens is not whole blocks of D")

    def behind_another(self) -> Case:
        """The same case behind a prompt that fills four blocks of P's and most of a fifth."""
        tokens = 5 * self.prefill.block_tokens - 1
        prefill, decode = (
            replace(side, planned_blocks=side.planned_blocks - -tokens // side.block_tokens)
            for side in (self.prefill, self.decode)
        )
        return replace(self, prefill=prefill, decode=decode, tokens_before=tokens)

    def stock(self) -> Case:
        """The same case with kvpatch off on both sides."""
        return replace(
            self,
            prefill=replace(self.prefill, patched=False, patches=()),
            decode=replace(self.decode, patched=False, patches=()),
        )

    def patched(self, *slugs: str, prefill: bool = True) -> Case:
        """The same case with kvpatch on, on both sides or on D alone."""

        def switched_on(engine: EngineSpec) -> EngineSpec:
            return replace(engine, patched=True, patches=slugs)

        return replace(
            self,
            prefill=switched_on(self.prefill) if prefill else self.prefill,
            decode=switched_on(self.decode),
        )


@dataclass(frozen=True)
class Report:
    """What came of a case.

    identical
        Every element that D should hold is what P held, nothing outside the
        requests' blocks was written, D reported the transfer done and P was told. And the same
        comparison noticed each way in which D's cache was spoilt afterwards: `noticed`.
    corrupt
        The release called it done, and D holds something else.
    refused
        The load failed alone, or an engine was not let start; `detail` says why.
    failed
        No answer: an engine that ended, a crash, a hang, a missing completion, or an
        error of the lab.
    """

    outcome: Outcome
    detail: str = ""
    wrong_elements: int = 0
    total_elements: int = 0
    #: Tokens that D was to load, over all requests.
    moved_tokens: int = 0
    #: Bytes written outside the requests' own blocks.
    stray_bytes: int = 0
    #: NIXL descriptors in the READs that D posted, but for those of its own memory.
    descriptors: int = 0
    #: Memory regions that D's worker registered, but for the one that reads are measured in.
    registrations: int = 0
    #: NIXL descriptors that D prepared at handshakes, of P's memory and of its own.
    prepared: int = 0
    #: Whether P answers handshakes when all is over, where it is of another release than D.
    listens: bool = True
    #: Wrong elements once D's cache was spoilt, by the way: negative controls of what is identical.
    noticed: Mapping[str, int] = field(default_factory=dict, compare=False)
    seconds: float = field(default=0.0, compare=False)

    def must_be(self, outcome: Outcome, *says: str, moved: int | None = None) -> Report:
        """The same report, of which this is asserted.

        Args:
            says: words of the detail.
            moved: the tokens that D was to load.
        """
        assert self.outcome == outcome, self
        for words in says:
            assert words in self.detail, self
        assert moved is None or self.moved_tokens == moved, self
        return self
