"""One record of facts per vLLM release: the only version data in kvpatch.

A fact that is true or false names the releases in which it turned; of other facts a record says
what its release changed against the one before. The contract tests hold every fact of every
release against that release's source. Releases are looked up one by one: a range would take in a
release that nobody has seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from kvpatch.core.errors import ReleaseNotKnown


@dataclass(frozen=True)
class Place:
    """A class and the module that defines it."""

    module: str
    owner: str


#: How FlashAttention's tensors begin; packed ones have keys and values in one row.
CacheShape = Literal["keys first", "blocks first", "packed"]


class Form(NamedTuple):
    """How the tensors of a backend begin, and how keys lie in its blocks."""

    shape: CacheShape | Literal["latents"]
    by_column: bool = False

    def __str__(self) -> str:
        return f"{self.shape}, keys by column" if self.by_column else self.shape


_TURNS = "turns"


#: What D asks a P for: nothing, at the port of a rank; a rank; a rank of a stage of a pipeline.
Question = Literal["at a port", "rank", "stage and rank"]


def _since(*turns: str) -> bool:
    """A fact that is false until the first of these releases, true until the second, and so on."""
    found: bool = field(default=False, metadata={_TURNS: turns})
    return found


@dataclass(frozen=True)
class ReleaseFacts:
    """The facts that kvpatch has to know of one release."""

    #: its public version.
    release: str
    #: of the run of releases that are tested alike, for ``KVPATCH_GENERATION``.
    generation: str
    #: the class that defines ``NixlConnector``'s methods; importing its module defines or
    #: imports every class below.
    connector: Place
    #: the class that registers KV caches.
    worker: Place
    #: the class that reads blocks from a peer.
    reader: Place
    #: the class that plans transfers.
    scheduler: Place
    #: where the API server takes requests to ``/v1/completions``.
    completions_module: str
    #: the parameters of the engine client's ``add_request``.
    server_request: tuple[str, ...]
    #: the fields of what a worker states at the handshake.
    agent_metadata: frozenset[str]
    #: what a worker hashes into the compatibility hash that it states (from 0.13).
    hash_factors: frozenset[str]
    #: of the connector's protocol, one of these; 0 where there is no hash.
    connector_version: int
    #: of backends whose blocks hold rows of tokens, how their tensors begin; of those alone
    #: that have the layout which they state.
    backend_forms: Mapping[str, Form]
    #: what D asks P for at a handshake.
    question: Question
    #: the fields of what P answers a request with, which D is sent.
    answer: frozenset[str]
    #: the fields of ``kv_transfer_params`` that its connector reads.
    params: frozenset[str]
    #: what the number means that D tells P with the name of a request: how many of D's ranks
    #: read each of P's, or all of D's.
    reader_count: Literal["readers of a rank", "ranks"]
    #: the fields of a request to receive, in the connector's metadata.
    request_metadata: frozenset[str]
    #: the scheduler's name of what its workers report to it.
    core_output: str
    #: the scheduler's name of how many tokens of a prompt P computes.
    prefill_count: str
    #: where the worker's module lists the devices that it can be made for.
    device_table: str
    #: the worker's name of whether its tensors are a TPU's.
    tpu_flag: str
    #: of how many ranks share out the tokens of a block, in the configuration.
    context_sizes: tuple[str, ...]
    #: what the block manager is told of a request that is over, beside its name, to let go of what
    #: is in front of its window; nothing where that is more than it has computed (<= 0.19).
    window_end: tuple[str, ...]
    #: how FlashAttention's tensors begin.
    cache_shape: CacheShape
    #: where a worker finds out the shape of its caches: from flags of its own, from its
    #: topology's backend, from its one backend, from all its backends, or from the layout's name.
    shape_source: Literal["flags", "topology", "backend", "backends", "layout name"]
    #: what a worker makes of a load that failed: it knows no such thing, or it reports the
    #: request as one received, or so with the first of its reads that fails, or as what it is.
    failed_loads: Literal["unknown", "as received", "by the first", "as failed"]
    #: the worker's name for what it knows of the ranks of both sides; empty where it has no
    #: such object.
    topology: Literal["", "kv_topo", "transfer_topo"] = ""
    #: the worker's names of what it keeps of its regions and may state of them.
    books_of_regions: tuple[str, ...] = ()
    #: the server has errors of its own for bad requests.
    has_validation_errors: bool = _since("0.14.0")
    #: the server takes an empty text beside embeddings for no prompt.
    skips_empty_prompts: bool = _since("0.10.0", "0.16.0")
    #: the scheduler keeps how many tokens of a request were cached here.
    counts_prefix_hits: bool = _since("0.20.0")
    #: the configuration has a list of all sizes that a block may have.
    lists_block_sizes: bool = _since("0.10.1", "0.18.0")
    #: a backend has a method that says which kernel blocks it takes.
    asks_for_kernel_sizes: bool = _since("0.12.0")
    #: the metadata of a read that failed is gone.
    forgets_failed_reads: bool = _since("0.11.1", "0.14.0")
    #: P ignores a notification that a request was read which it does not know.
    forgives_unknown_reads: bool = _since("0.10.1")
    #: D computes the last, partial block of a prompt.
    loads_whole_blocks_only: bool = _since("0.10.0", "0.10.1")
    #: the connector asks vLLM for a cache layout.
    asks_for_layout: bool = _since("0.10.1")
    #: a worker can mirror its cache in host memory.
    has_host_buffer: bool = _since("0.10.1")
    #: the configuration can name other NIXL backends than UCX.
    chooses_backends: bool = _since("0.11.0")
    #: the mirror has a layout of its own, which a handshake states.
    has_host_buffer_layout: bool = _since("0.11.1")
    #: a worker looks at its device's name once more as it registers.
    checks_device_again: bool = _since("0.10.1", "0.10.2")
    #: a connector can say that it does not know yet what it will load.
    can_answer_later: bool = _since("0.10.2")
    #: layers that share a tensor are registered once.
    registers_shared_tensors_once: bool = _since("0.10.2")
    #: the scheduler answers handshakes, and not each worker.
    listens_in_scheduler: bool = _since("0.11.1")
    #: the listener is handed its host.
    listens_by_host: bool = _since("0.22.0")
    #: the scheduler tells P's worker which finished requests nobody will read.
    books_unprocessed: bool = _since("0.11.1")
    #: a worker keeps what it states encoded, beside a hash of it.
    encodes_metadata: bool = _since("0.13.0")
    #: a worker shakes hands with one rank of its peer.
    meets_one_rank: bool = _since("0.10.0", "0.14.0")
    #: larger blocks fail a handshake before anything is read of it.
    compares_block_sizes_first: bool = _since("0.11.1", "0.14.0")
    #: the worker's topology keeps a block size of its own.
    topology_has_block_size: bool = _since("0.11.1", "0.12.0")
    #: a worker counts kernel blocks where its kernel has smaller ones.
    cuts_blocks: bool = _since("0.11.1")
    #: an attention backend says whether its layers have recurrent state.
    backends_tell_state: bool = _since("0.20.0")
    #: a worker keeps the metadata of a load until it is done.
    keeps_load_metadata: bool = _since("0.10.1")
    #: a worker prepares its own blocks in parts for a peer of more ranks.
    divides_own_blocks: bool = _since("0.14.0")
    #: a worker books how a peer's blocks are cut, by the bytes of its states.
    books_cuts_of_peers: bool = _since("0.20.0", "0.21.0")
    #: a worker with recurrent state does not start unless its convolutions' channels are
    #: outermost, and reads those of other ranks by shares.
    has_channels_first: bool = _since("0.20.0")
    #: the blocks of an aborted request stay while they are written to.
    keeps_aborted_blocks: bool = _since("0.16.0")
    #: P's ids are expanded to kernel blocks before a request is read.
    expands_remote_blocks: bool = _since("0.11.1", "0.20.0")
    #: each of P's ids is expanded to as many kernel blocks as one of D's blocks has.
    expands_by_own_cut: bool = _since("0.20.0", "0.22.0")
    #: the connector is handed the plan, which has groups of layers.
    has_cache_groups: bool = _since("0.18.0")
    #: the scheduler looks at a step's tokens where loads failed.
    counts_tokens_of_failed: bool = _since("0.19.0")
    #: the scheduler keeps blocks back for the tokens that it has to compute behind loaded ones.
    reserves_for_loads: bool = _since("0.23.0")
    #: the server has P told of a request that it answers with an error.
    tells_of_rejections: bool = _since("0.21.0")
    #: the scheduler takes all slots of loaded blocks for computed tokens.
    counts_loaded_slots: bool = _since("0.10.0", "0.18.0")
    #: a P of as many ranks as heads is taken for one that shares them.
    counts_one_head: bool = _since("0.10.0", "0.20.0")
    #: a D of more ranks than heads finds its head in a P of fewer ranks.
    reads_its_share: bool = _since("0.24.0")
    #: beside MLA, ranks share out the heads of a draft model, and find theirs in a P of fewer.
    shares_draft_heads: bool = _since("0.33.0")
    #: P may load an earlier turn from D.
    reads_back: bool = _since("0.21.0")
    #: a worker on a CPU reorders loads of other backends' blocks for its own.
    reorders_for_cpu: bool = _since("0.20.0")
    #: it takes another dimension for that of blocks there, and ends.
    ends_by_reordering: bool = _since("0.23.0", "0.27.0")
    #: D reserves blocks for drafted tokens while it loads a prompt.
    reserves_drafted_blocks: bool = _since("0.10.0", "0.10.1", "0.23.0", "0.25.0")
    #: P keeps a prompt for as long as D renews its lease, and not for a fixed time.
    grants_leases: bool = _since("0.22.0")
    #: P's lists may go on behind the prompt where P drafts tokens.
    lists_drafted_blocks: bool = _since("0.10.0", "0.25.0")
    #: one of several cache groups gets blocks for loaded tokens before the next one's prefix hit
    #: is held.
    allocates_before_holding: bool = _since("0.18.0", "0.24.0")
    #: of a model with recurrent state the group with the longest prefix hit decides for all.
    takes_longest_hit: bool = _since("0.24.0", "0.27.0")
    #: the blocks of a request that ends while a step is under way are freed behind that step.
    frees_blocks_later: bool = _since("0.24.0")
    #: a step of the scheduler can leave new prompts out.
    throttles_prefills: bool = _since("0.24.0")
    #: the plan says which groups are transferred, and where in a tensor its layers lie.
    plans_transfers: bool = _since("0.29.0")
    #: a layout is a name, and the regions of a peer have strides.
    names_layouts: bool = _since("0.29.0")
    #: heads of smaller blocks find their places in any layout.
    pairs_heads_by_layout: bool = _since("0.32.0")
    #: smaller blocks are put together where there are several block tables.
    joins_in_groups: bool = _since("0.27.0")
    #: of a P of more ranks all are read for their states, where latents are whole on each.
    reads_states_by_latents: bool = _since("0.27.0")
    #: of the handshakes, where nobody says another.
    side_channel_port: int = 5557
    #: that P keeps a prompt for a D that is not heard of, or whose lease is not renewed.
    blocks_kept_seconds: int = 120
    #: a step that is under way writes to no block of a load, where a model has recurrent
    #: state.
    spares_loaded_blocks: bool = _since("0.26.0")
    #: a worker takes back what it has registered while its engine sleeps.
    can_sleep: bool = _since("0.33.0")
    #: the class of what workers tell of transfers; None where ``/metrics`` has none of it.
    stats: Place | None = None
    #: the scheduler's half of the connector is asked too, in each step.
    asks_scheduler_for_stats: bool = _since("0.24.0")
    #: the module with the API server's argument parser, where vLLM resolves a layout for the
    #: whole model; empty where it does not.
    server_arguments: str = ""
    #: the engine's core groups layers before it plans their memory.
    groups_layers_first: bool = _since("0.33.0")
    #: ``--kv-transfer-config`` may have the fields of older connectors, such as ``kv_rank``.
    takes_kv_rank: bool = _since("0.10.0", "0.32.0")

    @property
    def states_layout(self) -> bool:
        """True if a handshake names the layout of the caches."""
        return "kv_cache_layout" in self.agent_metadata

    @property
    def states_block_size(self) -> bool:
        """True if a handshake has the tokens of a block, and not its bytes alone."""
        return "block_size" in self.agent_metadata

    @property
    def states_device(self) -> bool:
        """True if a handshake has the number of the worker's device; that is its rank elsewhere."""
        return "device_id" in self.agent_metadata

    @property
    def has_bytes_by_region(self) -> bool:
        """True if a worker keeps the bytes of a block for each region, and not one number."""
        return "block_lens" in self.agent_metadata

    @property
    def names_regions(self) -> bool:
        """True if regions have a name, a group, a count of blocks and a kind of memory."""
        return "region_names" in self.agent_metadata

    @property
    def states_kernel_blocks(self) -> bool:
        """True if a handshake says into how many kernel blocks a block is cut."""
        return "physical_blocks_per_logical_kv_block" in self.agent_metadata

    @property
    def states_context_parallelism(self) -> bool:
        """True if a handshake says how many ranks share out the tokens of a block."""
        return "dcp_size" in self.agent_metadata

    @property
    def states_hash(self) -> bool:
        """True if a handshake has a hash of what both sides must have alike."""
        return bool(self.hash_factors)

    def package_of(self, module: str) -> str:
        """The package whose modules may subclass what a module defines."""
        place = self.connector.module if "kv_connector" in module else module
        return place.rpartition(".")[0]

    def form_of(self, backend: object) -> Form | None:
        """How a backend's tensors begin; None where that is not known."""
        return self.backend_forms.get(str(backend))

    @property
    def names_remote_request(self) -> bool:
        """True if P has a name of its own for a request, in what it hands on of it."""
        return "remote" in self.request_metadata

    @property
    def saves_by_address(self) -> bool:
        """True if P looks for a peer's address, which nobody has yet, where it saves a prompt."""
        return self.has_host_buffer and not self.names_remote_request

    @property
    def loses_failed_groups(self) -> bool:
        """True if a failed load is reported as received where there are several cache groups."""
        return self.has_cache_groups and self.failed_loads != "as failed"


_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_COMPLETIONS = "vllm.entrypoints.openai"
_ONE_MODULE = f"{_CONNECTORS}.nixl_connector"
_PACKAGE = f"{_CONNECTORS}.nixl"
_REQUEST = (
    *("self", "request_id", "prompt", "params", "arrival_time", "lora_request"),
    *("tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank"),
)
_HASHED = frozenset(
    ("vllm_version", "nixl_connector_version", "model", "dtype", "num_kv_heads", "head_size")
) | {"num_hidden_layers", "attn_backend_name", "cache_dtype"}


_LATENTS = dict.fromkeys(
    ("TRITON_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA"), Form("latents")
)

_ADDRESS = frozenset(("remote_block_ids", "remote_host", "remote_port", "remote_engine_id"))

_0_10_0 = ReleaseFacts(
    release="0.10.0",
    generation="g0100",
    connector=Place(_ONE_MODULE, "NixlConnector"),
    worker=Place(_ONE_MODULE, "NixlConnectorWorker"),
    reader=Place(_ONE_MODULE, "NixlConnectorWorker"),
    scheduler=Place(_ONE_MODULE, "NixlConnectorScheduler"),
    completions_module=f"{_COMPLETIONS}.serving_completion",
    server_request=_REQUEST,
    agent_metadata=frozenset(
        ("engine_id", "agent_metadata", "kv_caches_base_addr", "num_blocks", "block_len")
    )
    | {"attn_backend_name"},
    hash_factors=frozenset(),
    connector_version=0,
    backend_forms={},
    question="at a port",
    answer=_ADDRESS | {"do_remote_prefill", "do_remote_decode", "tp_size"},
    params=_ADDRESS | {"do_remote_prefill", "do_remote_decode", "tp_size"},
    reader_count="readers of a rank",
    request_metadata=_ADDRESS | {"local_block_ids", "tp_size"},
    core_output="model_runner_output",
    prefill_count="",
    device_table="",
    tpu_flag="",
    context_sizes=(),
    window_end=(),
    cache_shape="keys first",
    shape_source="flags",
    failed_loads="unknown",
)
_0_10_1 = replace(
    _0_10_0,
    release="0.10.1",
    generation="g0101",
    agent_metadata=_0_10_0.agent_metadata | {"kv_cache_layout"},
    core_output="kv_connector_output",
    device_table="_NIXL_SUPPORTED_XPUS",
    tpu_flag="_use_pallas_v1",
)
_0_10_1_1 = replace(_0_10_1, release="0.10.1.1")
_0_10_2 = replace(
    _0_10_1_1, release="0.10.2", generation="g0102", context_sizes=("decode_context_parallel_size",)
)
_0_11_0 = replace(
    _0_10_2,
    release="0.11.0",
    generation="g0110",
    agent_metadata=_0_10_2.agent_metadata - {"block_len"} | {"block_lens"},
    device_table="_NIXL_SUPPORTED_DEVICE",
    tpu_flag="_use_pallas",
)
_0_11_1 = replace(
    _0_11_0,
    release="0.11.1",
    generation="g0111",
    server_request=(*_REQUEST, "prompt_text"),
    agent_metadata=_0_11_0.agent_metadata | {"device_id", "block_size"},
    request_metadata=_0_11_0.request_metadata | {"local_physical_block_ids"},
    shape_source="topology",
    topology="kv_topo",
    failed_loads="as received",
    stats=Place(_ONE_MODULE, "NixlKVConnectorStats"),
    side_channel_port=5600,
    blocks_kept_seconds=480,
    question="rank",
)
_0_11_2 = replace(_0_11_1, release="0.11.2")
_0_12_0 = replace(
    _0_11_2,
    release="0.12.0",
    generation="g0120",
    context_sizes=("decode_context_parallel_size", "prefill_context_parallel_size"),
)
_0_13_0 = replace(
    _0_12_0,
    release="0.13.0",
    generation="g0130",
    hash_factors=_HASHED,
    connector_version=2,
    backend_forms={
        "FLASH_ATTN": Form("keys first"),
        "FLASHINFER": Form("blocks first"),
        "CPU_ATTN": Form("keys first", by_column=True),
        **_LATENTS,
    },
    agent_metadata=_0_12_0.agent_metadata - {"attn_backend_name"},
    request_metadata=_0_12_0.request_metadata - _ADDRESS | {"remote"},
    answer=_0_12_0.answer | {"remote_request_id"},
    params=_0_12_0.params | {"remote_request_id"},
)
_0_14_0 = replace(_0_13_0, release="0.14.0", generation="g0140", tpu_flag="", reader_count="ranks")
_0_14_1 = replace(_0_14_0, release="0.14.1")
_0_15_0 = replace(
    _0_14_1, release="0.15.0", completions_module=f"{_COMPLETIONS}.completion.serving"
)
_0_15_1 = replace(_0_15_0, release="0.15.1")
_0_16_0 = replace(
    _0_15_1,
    release="0.16.0",
    generation="g0160",
    hash_factors=_0_15_1.hash_factors | {"cross_layers_blocks"},
    shape_source="backend",
)
_0_17_0 = replace(
    _0_16_0,
    release="0.17.0",
    generation="g0170",
    server_request=(*_0_16_0.server_request, "reasoning_ended"),
)
_0_17_1 = replace(_0_17_0, release="0.17.1")
_0_18_0 = replace(
    _0_17_1,
    release="0.18.0",
    generation="g0180",
    hash_factors=_0_17_1.hash_factors | {"is_hma_enabled"},
    agent_metadata=_0_17_1.agent_metadata | {"ssm_sizes"},
    shape_source="backends",
)
_0_18_1 = replace(_0_18_0, release="0.18.1")
_0_19_0 = replace(_0_18_1, release="0.19.0", prefill_count="_mamba_prefill_token_count")
_0_19_1 = replace(_0_19_0, release="0.19.1")
_0_20_0 = replace(
    _0_19_1,
    release="0.20.0",
    generation="g0200",
    backend_forms={**_0_19_1.backend_forms, "TRITON_ATTN": Form("blocks first")},
    connector=Place(f"{_PACKAGE}.connector", "NixlConnector"),
    worker=Place(f"{_PACKAGE}.worker", "NixlConnectorWorker"),
    reader=Place(f"{_PACKAGE}.worker", "NixlConnectorWorker"),
    scheduler=Place(f"{_PACKAGE}.scheduler", "NixlConnectorScheduler"),
    stats=Place(f"{_PACKAGE}.stats", "NixlKVConnectorStats"),
    agent_metadata=_0_19_1.agent_metadata | {"attn_backend_name"},
    window_end=("total_computed_tokens",),
    topology="transfer_topo",
)
_0_20_1 = replace(
    _0_20_0, release="0.20.1", server_request=(*_0_20_0.server_request, "reasoning_parser_kwargs")
)
_0_20_2 = replace(_0_20_1, release="0.20.2")
_0_21_0 = replace(
    _0_20_2,
    release="0.21.0",
    generation="g0210",
    connector_version=3,
    agent_metadata=_0_20_2.agent_metadata | {"physical_blocks_per_logical_kv_block"},
    answer=_0_20_2.answer | {"remote_num_tokens"},
    params=_0_20_2.params | {"remote_num_tokens"},
)
_0_22_0 = replace(
    _0_21_0,
    release="0.22.0",
    generation="g0220",
    connector_version=4,
    failed_loads="by the first",
    blocks_kept_seconds=30,
)
_0_22_1 = replace(_0_22_0, release="0.22.1")
_0_23_0 = replace(
    _0_22_1,
    release="0.23.0",
    generation="g0230",
    backend_forms={
        **dict.fromkeys(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), Form("blocks first")),
        "CPU_ATTN": Form("packed", by_column=True),
        **_LATENTS,
    },
    cache_shape="blocks first",
)
_0_24_0 = replace(
    _0_23_0,
    release="0.24.0",
    generation="g0240",
    connector=Place(f"{_PACKAGE}.connector", "NixlBaseConnector"),
    worker=Place(f"{_PACKAGE}.base_worker", "NixlBaseConnectorWorker"),
    reader=Place(f"{_PACKAGE}.pull_worker", "NixlPullConnectorWorker"),
    scheduler=Place(f"{_PACKAGE}.base_scheduler", "NixlBaseConnectorScheduler"),
    request_metadata=_0_23_0.request_metadata | {"remote_block_size"},
    params=_0_23_0.params | {"remote_block_size"},
)
_0_25_0 = replace(
    _0_24_0,
    release="0.25.0",
    generation="g0250",
    prefill_count="_get_remote_prefill_token_count",
    window_end=("total_computed_tokens", "num_prompt_tokens"),
)
_0_25_1 = replace(_0_25_0, release="0.25.1")
_0_26_0 = replace(
    _0_25_1,
    release="0.26.0",
    generation="g0260",
    backend_forms={
        **_0_25_1.backend_forms,
        **dict.fromkeys(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"), Form("packed")),
    },
    connector_version=5,
    request_metadata=_0_25_1.request_metadata | {"pp_size"},
    window_end=("processed_computed_tokens", "num_prompt_tokens"),
    cache_shape="packed",
    question="stage and rank",
    answer=_0_25_1.answer | {"remote_blocks_expiry_time"},
    params=_0_25_1.params | {"remote_blocks_expiry_time", "pp_size"},
)
_0_27_0 = replace(_0_26_0, release="0.27.0")
_0_27_1 = replace(_0_27_0, release="0.27.1")
_0_28_0 = replace(
    _0_27_1,
    release="0.28.0",
    hash_factors=_0_27_1.hash_factors | {"speculative_config", "transfer_mode"},
    connector_version=7,
    server_request=(*_REQUEST, "session_id", *_0_27_1.server_request[len(_REQUEST) :]),
    answer=_0_27_1.answer | {"transfer_mode"},
)
_0_29_0 = replace(
    _0_28_0,
    release="0.29.0",
    generation="g0290",
    backend_forms={**_0_28_0.backend_forms, "FLEX_ATTENTION": Form("packed")},
    hash_factors=_0_28_0.hash_factors - {"cross_layers_blocks"},
    connector_version=9,
    agent_metadata=_0_28_0.agent_metadata | {"block_strides", "dcp_size", "pcp_size"},
    request_metadata=_0_28_0.request_metadata | {"dcp_size", "local_num_computed_blocks"},
    shape_source="layout name",
    answer=_0_28_0.answer | {"dcp_size", "pp_size"},
    params=_0_28_0.params | {"dcp_size"},
    reader_count="readers of a rank",
    server_arguments="vllm.entrypoints.launchers.cli_args",
)
_0_30_0 = replace(
    _0_29_0,
    release="0.30.0",
    generation="g0300",
    connector_version=11,
    agent_metadata=_0_29_0.agent_metadata
    | {"region_num_blocks", "region_group_ids", "region_names", "region_mem_types"},
    request_metadata=_0_29_0.request_metadata | {"awaiting_kvs", "region_blocks_to_zero"},
    failed_loads="as failed",
    books_of_regions=("region_names", "region_group_ids"),
)
_0_31_0 = replace(
    _0_30_0,
    release="0.31.0",
    connector_version=13,
    server_request=(*_0_30_0.server_request, "kv_hints"),
    agent_metadata=_0_30_0.agent_metadata | {"region_members", "packed_member_layouts"},
    books_of_regions=(*_0_30_0.books_of_regions, "region_members"),
)
_0_32_0 = replace(
    _0_31_0,
    release="0.32.0",
    connector_version=14,
    agent_metadata=_0_31_0.agent_metadata | {"ple_block_len"},
)
_0_33_0 = replace(
    _0_32_0,
    release="0.33.0",
    connector_version=15,
    books_of_regions=(*_0_32_0.books_of_regions, "_packed_member_layouts"),
    server_arguments="vllm.entrypoints.common.cli_args",
    answer=_0_32_0.answer | {"remote_registration_generation"},
    params=_0_32_0.params | {"remote_registration_generation"},
)


@dataclass(frozen=True)
class Build:
    """A vLLM, as kvpatch takes it.

    Attributes:
        facts: those of the release that it is, or is taken for.
        by_code: True where it is not listed, and was recognised by its code.
        moved: of such a build, the patches that are refused, and what has moved.
    """

    version: str
    facts: ReleaseFacts
    by_code: bool = False
    moved: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        taken_for = f" (as {self.facts.release}, by its code)" if self.by_code else ""
        return f"{self.version}{taken_for}"


_RECORDS = (
    *(_0_10_0, _0_10_1, _0_10_1_1, _0_10_2, _0_11_0, _0_11_1, _0_11_2, _0_12_0, _0_13_0),
    *(_0_14_0, _0_14_1, _0_15_0, _0_15_1, _0_16_0, _0_17_0, _0_17_1, _0_18_0, _0_18_1),
    *(_0_19_0, _0_19_1, _0_20_0, _0_20_1, _0_20_2, _0_21_0, _0_22_0, _0_22_1, _0_23_0),
    *(_0_24_0, _0_25_0, _0_25_1, _0_26_0, _0_27_0, _0_27_1, _0_28_0, _0_29_0, _0_30_0),
    *(_0_31_0, _0_32_0, _0_33_0),
)

#: Every supported release, oldest first.
RELEASES: tuple[str, ...] = tuple(facts.release for facts in _RECORDS)


def _turned(record: ReleaseFacts) -> ReleaseFacts:
    """Returns a record with the facts that are true or false."""
    until_now = RELEASES[: RELEASES.index(record.release) + 1]
    found: dict[str, Any] = {
        fact.name: sum(map(until_now.count, fact.metadata[_TURNS])) % 2 == 1
        for fact in fields(record)
        if _TURNS in fact.metadata
    }
    return replace(record, **found)


#: The facts of every supported release, oldest first.
FACTS: Mapping[str, ReleaseFacts] = MappingProxyType(
    {facts.release: _turned(facts) for facts in _RECORDS}
)

#: The releases of every generation, oldest first.
GENERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        slug: tuple(r for r, facts in FACTS.items() if facts.generation == slug)
        for slug in dict.fromkeys(facts.generation for facts in FACTS.values())
    }
)

#: Where the connector has been, for a release that is not known.
CONNECTORS: tuple[Place, ...] = tuple(dict.fromkeys(facts.connector for facts in FACTS.values()))


def listed(version: str) -> ReleaseFacts | None:
    """The facts of a release; None of one that is not in the table, a pre-release included.

    Local labels (``+cpu``, ``+cu129``) do not matter.
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        public = version
    return FACTS.get(public)


def facts_of(version: str, override: str | None = None) -> ReleaseFacts:
    """Returns the facts of a release of which nothing but the version is known.

    Args:
        override: the release or generation to take another one for.
    """
    found = listed(version)
    if found is not None:
        return found
    if override:
        return facts_named(override)
    raise ReleaseNotKnown(
        f"vLLM {version} is not a release that kvpatch knows (those from {RELEASES[0]} to "
        f"{RELEASES[-1]})",
        "set KVPATCH_GENERATION to the release whose code it has, which kvpatch doctor says where "
        "it is installed",
    )


def facts_named(name: str) -> ReleaseFacts:
    """Returns the facts that ``KVPATCH_GENERATION`` names: a release's, or a generation's."""
    if name in FACTS:
        return FACTS[name]
    if name in GENERATIONS:
        return FACTS[GENERATIONS[name][-1]]
    raise ReleaseNotKnown(
        f"KVPATCH_GENERATION={name!r} names no generation; there are "
        f"{', '.join(f'{slug} ({of[0]} to {of[-1]})' for slug, of in GENERATIONS.items())}, "
        "and each of these releases",
        "set one of them, or unset it",
    )
