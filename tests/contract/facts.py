"""Reads every fact of a release from its source, to hold the record against it.

Each fact has one probe, and each probe looks at what the code of kvpatch leans on: a parameter, a
field, a statement of the body in which the fact shows.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvpatch.core.releases import (
    CacheShape,
    Form,
    Place,
    Question,
    ReleaseFacts,
)

from .source import Method, classes, method, text

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_BLOCK_MANAGER = "vllm.v1.core.kv_cache_manager"
_BLOCK_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_INTERFACE = "vllm.v1.kv_cache_interface"


class Moved(LookupError):
    """A class of the connector's is in none of the places that are known."""


@dataclass(frozen=True)
class NotFound:
    """Stands in for a fact whose place in the source has moved."""

    why: str


def _place(defines: str, *candidates: str) -> cached_property[Place]:
    """The first of these classes of the connector's that defines a method."""

    def find(source: Source) -> Place:
        for module, _, owner in (name.rpartition(".") for name in candidates):
            place = Place(f"{_CONNECTORS}.{module}", owner)
            if source.method(place, defines) is not None:
                return place
        raise Moved(f"none of {', '.join(candidates)} in {_CONNECTORS} defines {defines}")

    return cached_property(find)


@dataclass(frozen=True)
class Source:
    """One release's source."""

    release: str

    def method(self, place: Place | str, name: str) -> Method | None:
        """A method of a class, or by a dotted name of a module; None where there is none."""
        module, owner = (place, "") if isinstance(place, str) else (place.module, place.owner)
        found = method(self.release, module, f"{owner}.{name}" if owner else name)
        return None if isinstance(found, str) else found

    def body(self, place: Place | str, name: str) -> str:
        """A method's statements, empty where there is no such method."""
        found = self.method(place, name)
        return "" if found is None else "\n".join(found.lines)

    def parameters(self, place: Place | str, name: str) -> tuple[str, ...]:
        """A method's parameters, none where there is no such method."""
        found = self.method(place, name)
        return () if found is None else found.parameters

    def fields(self, name: str) -> frozenset[str]:
        """The annotated fields of a class of the connector's, wherever it is nested."""
        modules = (
            self.worker.module,
            f"{_CONNECTORS}.nixl.metadata",
            self.scheduler.module,
            _UTILS,
        )
        found = (self.fields_in(module, name) for module in modules)
        return next(filter(None, found), frozenset())

    def fields_in(self, module: str, name: str) -> frozenset[str]:
        """The annotated fields of a module's class, none where there is no such class."""
        for found in classes(self.release, module):
            if found.name == name:
                targets = (s.target for s in found.body if isinstance(s, ast.AnnAssign))
                return frozenset(t.id for t in targets if isinstance(t, ast.Name))
        return frozenset()

    connector = _place(
        "get_num_new_matched_tokens",
        "nixl.connector.NixlBaseConnector",
        "nixl.connector.NixlConnector",
        "nixl_connector.NixlConnector",
    )
    worker = _place(
        "register_kv_caches",
        "nixl.base_worker.NixlBaseConnectorWorker",
        "nixl.worker.NixlConnectorWorker",
        "nixl_connector.NixlConnectorWorker",
    )
    reader = _place(
        "_read_blocks_for_req",
        "nixl.pull_worker.NixlPullConnectorWorker",
        "nixl.worker.NixlConnectorWorker",
        "nixl_connector.NixlConnectorWorker",
    )
    scheduler = _place(
        "build_connector_meta",
        "nixl.base_scheduler.NixlBaseConnectorScheduler",
        "nixl.scheduler.NixlConnectorScheduler",
        "nixl_connector.NixlConnectorScheduler",
    )

    def core(self, name: str) -> str:
        """A body of vLLM's own scheduler."""
        return self.body(_SCHEDULER, f"Scheduler.{name}")

    def place(self, name: str) -> Place | str:
        """A class of the connector's by its part in it; a module is its own name."""
        return name if "." in name else getattr(self, name)


def _completions_module(source: Source) -> str:
    names = (f"vllm.entrypoints.openai.{n}" for n in ("serving_completion", "completion.serving"))
    (found,) = (
        name for name in names if source.method(name, "OpenAIServingCompletion.create_completion")
    )
    return found


def _skips_empty_prompts(source: Source) -> bool:
    """An empty text ends the list of what was embedded; from 0.16 on it is a prompt too."""
    preprocess = "OpenAIServing._tokenize_prompt_input_or_inputs_async"
    found = source.body("vllm.entrypoints.openai.serving_engine", preprocess)
    render = "CompletionRenderer.render_prompt_and_embeds"
    found += source.body("vllm.entrypoints.renderer", render)
    return "input_or_inputs == ''" in found or "prompt_or_prompts == ''" in found


_EXPANDS = "_logical_to_remote_kernel_block_ids"
_REORDERS = "post_process_device_kv_on_receive_heterogeneous_attn"


def _cache_shape(source: Source) -> CacheShape:
    body = source.body(_FLASH, "FlashAttentionBackend.get_kv_cache_shape")
    if "(2, num_blocks," in body:
        return "keys first"
    # From 0.29 no backend has a shape of its own; that of all is packed.
    return "blocks first" if "(num_blocks, 2," in body else "packed"


def _question(source: Source) -> Question:
    body = source.body(source.worker, "_nixl_handshake")
    if "sock.send(GET_META_MSG)" in body:
        return "at a port"
    return "stage and rank" if "(GET_META_MSG, remote_pp_rank, " in body else "rank"


def _answer(source: Source) -> frozenset[str]:
    """The names in the only dictionary that P makes of a request that is over."""
    places = (Place(f"{_CONNECTORS}.nixl.pull_scheduler", "NixlPullConnectorScheduler"),)
    bodies = (source.body(place, "request_finished") for place in (*places, source.scheduler))
    for node in ast.walk(ast.parse(textwrap.dedent(next(filter(None, bodies))))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            return frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
    return frozenset()


def _params(source: Source) -> frozenset[str]:
    """What the connector looks up by name in a client's parameters, wherever it does."""
    names = ("nixl_connector", "nixl.metadata", "nixl.scheduler", "nixl.base_scheduler")
    modules = (f"{_CONNECTORS}.{n}" for n in (*names, "nixl.pull_scheduler", "nixl.push_scheduler"))
    found = "".join(text(source.release, module) for module in modules)
    read = re.findall(r"params(?:\.get\(|\[)\s*\"([a-z]\w*)\"(?!\] =)", found)
    return frozenset(read)


def _reader_count(source: Source) -> str:
    """From 0.14 to 0.28 P works out from the ranks of D how many of them read one of its own."""
    body = source.body(source.reader, "_get_new_notifs")
    return "ranks" if "n_consumers = int(tp_size)" in body else "readers of a rank"


def _shape_source(source: Source) -> str:
    init, register = (source.body(source.worker, n) for n in ("__init__", "register_kv_caches"))
    if source.method(_FLASH, "FlashAttentionBackend.get_kv_cache_shape") is None:
        return "layout name"
    if "self.attn_backends = " in init:
        return "backends"
    if "self.attn_backend = " in init and "TpKVTopology(" in register:
        return "backend"
    return "topology" if "TpKVTopology(" in init else "flags"


def _topology(source: Source) -> str:
    bodies = [source.body(source.worker, n) for n in ("__init__", "register_kv_caches")]
    topologies = ("kv_topo", "transfer_topo")
    found = [name for name in topologies if any(f"self.{name} = " in body for body in bodies)]
    return found[0] if found else ""


def _failed_loads(source: Source) -> str:
    body = source.body(source.worker, "get_finished")
    if source.method(source.worker, "get_transfer_results") is not None:
        return "as failed"
    if "done_recving.update(self._failed_recv_reqs)" in body:
        return "as received"
    return "by the first" if "self._failed_recv_reqs.get_nowait()" in body else "unknown"


def _forgets_failed_reads(source: Source) -> bool:
    bodies = (source.body(source.worker, n) for n in ("_pop_done_transfers", _HANDLE_FAILED))
    return any("self._recving_metadata.pop(" in body for body in bodies)


def _stats(source: Source) -> Place | None:
    """Where there are metrics for them in the front end."""
    for module in (f"{_CONNECTORS}.nixl.stats", f"{_CONNECTORS}.nixl_connector"):
        if source.method(module, "NixlPromMetrics.observe") is not None:
            return Place(module, "NixlKVConnectorStats")
    return None


def _counts_one_head(source: Source) -> bool:
    """From 0.20 on more ranks than heads share them, and not as many."""
    body = source.body(_UTILS, "TransferTopology.is_kv_replicated")
    return "remote_tp_size > self.total_num_kv_heads" not in body


def _reserves_drafted_blocks(source: Source) -> bool:
    """Before 0.10.1 for every load; and where a drafter is no EAGLE, in 0.23 and 0.24."""
    body = source.core("schedule")
    return "effective_lookahead_tokens" not in body or "load_kv_async and self.use_eagle" in body


def _expands_remote_blocks(source: Source) -> bool:
    body = source.body(source.worker, "start_load_kv")
    names = ("meta.remote.block_ids", "meta.remote_block_ids")
    return any(f"{name} = self._logical_to_kernel_block_ids({name})" in body for name in names)


def _has_cache_groups(source: Source) -> bool:
    inits = [source.parameters(p, "__init__") for p in (source.worker, source.scheduler)]
    return all("kv_cache_config" in parameters for parameters in inits)


def _device_table(source: Source) -> str:
    modules = (source.worker.module, f"{_CONNECTORS}.nixl.utils")
    found = "".join(text(source.release, module) for module in modules)
    names = ("_NIXL_SUPPORTED_DEVICE", "_NIXL_SUPPORTED_XPUS")
    return next((name for name in names if re.search(rf"(?m)^{name}\b", found)), "")


def _tpu_flag(source: Source) -> str:
    body = source.body(source.worker, "__init__")
    names = ("_use_pallas", "_use_pallas_v1")
    return next((name for name in names if f"self.{name} = " in body), "")


def _window_end(source: Source) -> tuple[str, ...]:
    """Nothing where another count tells what is in front of a window."""
    skipped = source.body(_BLOCK_MANAGERS, "SlidingWindowManager.get_num_skipped_tokens")
    is_computed = "num_computed_tokens" in source.core("_connector_finished")
    if not is_computed or "num_computed_tokens - self.sliding_window + 1" not in skipped:
        return ()
    return source.parameters(_BLOCK_MANAGER, "KVCacheManager.remove_skipped_blocks")[2:]


def _context_sizes(source: Source) -> tuple[str, ...]:
    modules = ("vllm.config", "vllm.config.parallel")
    found = frozenset[str]().union(*(source.fields_in(m, "ParallelConfig") for m in modules))
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return tuple(name for name in names if name in found)


def _metadata_module(source: Source) -> str:
    """Where the connector's own constants and the hash are, in one module or in a package."""
    name = f"{_CONNECTORS}.nixl.metadata"
    return name if text(source.release, name) else source.worker.module


def _hash_factors(source: Source) -> frozenset[str]:
    body = source.body(_metadata_module(source), "compute_nixl_compatibility_hash")
    found = (node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Assign))
    dicts = [a.value for a in found if ast.unparse(a.targets[0]) == "factors"]
    if not dicts:
        return frozenset()
    (factors,) = dicts
    assert isinstance(factors, ast.Dict)
    return frozenset(k.value for k in factors.keys if isinstance(k, ast.Constant))


def _connector_version(source: Source) -> int:
    """Releases that state no hash number no version either."""
    found = text(source.release, _metadata_module(source))
    number = re.search(r"(?m)^NIXL_CONNECTOR_VERSION(?:: int)? = (\d+)$", found)
    return int(number[1]) if number else 0


_BACKENDS = "vllm.v1.attention.backends"
_ROWS = (
    f"{_BACKENDS}.flash_attn:FlashAttentionBackend",
    f"{_BACKENDS}.flashinfer:FlashInferBackend",
    f"{_BACKENDS}.triton_attn:TritonAttentionBackend",
    f"{_BACKENDS}.flex_attention:FlexAttentionBackend",
    f"{_BACKENDS}.cpu_attn:CPUAttentionBackend",
)
_LATENTS = (
    f"{_BACKENDS}.mla.triton_mla:TritonMLABackend",
    f"{_BACKENDS}.mla.flashmla:FlashMLABackend",
    f"{_BACKENDS}.mla.cutlass_mla:CutlassMLABackend",
    f"{_BACKENDS}.mla.flashinfer_mla:FlashInferMLABackend",
    f"{_BACKENDS}.mla.flashattn_mla:FlashAttnMLABackend",
)
_SHAPES: dict[str, CacheShape] = {
    "(2, num_blocks,": "keys first",
    "(num_blocks, 2, block_size": "blocks first",
    "(num_blocks, num_kv_heads, block_size, 2 * head_size)": "packed",
}


def _backend_forms(source: Source) -> dict[str, Form]:
    if not _hash_factors(source):
        return {}
    found = [_form_of_rows(source, *place.split(":")) for place in _ROWS]
    found += [_form_of_latents(source, *place.split(":")) for place in _LATENTS]
    return {name: form for name, form in found if form is not None}


def _name_of(source: Source, module: str, owner: str) -> str:
    return source.body(module, f"{owner}.get_name").removeprefix("return ").strip("'")


def _form_of_rows(source: Source, module: str, owner: str) -> tuple[str, Form | None]:
    """None where the order of heads and tokens is not the one that is stated."""
    name = _name_of(source, module, owner)
    if source.method(_FLASH, "FlashAttentionBackend.get_kv_cache_shape") is None:
        form: CacheShape = "packed"  # from 0.29 no backend has a shape of its own
    else:
        shape = source.body(module, f"{owner}.get_kv_cache_shape")
        form = next(form for words, form in _SHAPES.items() if words in shape)
        order = source.body(module, f"{owner}.get_kv_cache_stride_order")
        if name != "CPU_ATTN" and "get_kv_cache_layout()" not in order:
            return name, None
    return name, Form(form, by_column=name == "CPU_ATTN")


def _form_of_latents(source: Source, module: str, owner: str) -> tuple[str, Form]:
    found = [c for c in classes(source.release, module) if c.name == owner]
    assert [ast.unparse(base) for base in found[0].bases] == ["MLACommonBackend"], owner
    for own in ("get_kv_cache_shape", "customize_spec"):
        assert source.method(module, f"{owner}.{own}") is None, owner
    return _name_of(source, module, owner), Form("latents")


def _books_of_regions(source: Source) -> tuple[str, ...]:
    body = source.body(source.worker, "__init__")
    names = ("region_names", "region_group_ids", "region_members", "_packed_member_layouts")
    return tuple(name for name in names if f"self.{name}: " in body or f"self.{name} = " in body)


def _plans_transfers(source: Source) -> bool:
    tensor = source.fields_in(_INTERFACE, "KVCacheTensor")
    chooses = source.method(_INTERFACE, "KVCacheConfig.transfer_groups") is not None
    found = {chooses, {"layers", "layer_stride"} <= tensor}
    assert len(found) == 1, f"{source.release} does one of the two"
    return chooses


def _number_in_environment(source: Source, name: str) -> int:
    found = re.search(rf"(?m)^ +{name}: int = (\d+)", text(source.release, "vllm.envs"))
    return int(found.group(1)) if found else 0


def _blocks_kept_seconds(source: Source) -> int:
    fixed = _number_in_environment(source, "VLLM_NIXL_ABORT_REQUEST_TIMEOUT")
    leased = re.search(r"'kv_lease_duration', (\d+)", source.body(source.scheduler, "__init__"))
    return int(leased.group(1)) if leased else fixed


def _server_arguments(source: Source) -> str:
    """Only of releases that resolve one layout for a model: what is asked of the others is not."""
    release = source.release
    if "def resolve_kv_cache_layout(" not in text(release, "vllm.v1.attention.backends.utils"):
        return ""
    modules = (f"vllm.entrypoints.{part}.cli_args" for part in ("common", "launchers", "openai"))
    return next(name for name in modules if "def make_arg_parser(" in text(release, name))


def _says(place: str, name: str, words: str) -> Callable[[Source], bool]:
    """True where the body of a method has these words."""
    return lambda source: words in source.body(source.place(place), name)


def _has(place: str, name: str) -> Callable[[Source], bool]:
    """True where there is such a method."""
    return lambda source: source.method(source.place(place), name) is not None


def _takes(place: str, name: str, parameter: str) -> Callable[[Source], bool]:
    """True where a method has this parameter."""
    return lambda source: parameter in source.parameters(source.place(place), name)


#: The newest first: another stays beside it where it is something else.
_PREFILL_COUNTS = ("_get_remote_prefill_token_count", "_mamba_prefill_token_count")
_HANDLE_FAILED = "_handle_failed_transfer"

#: What the source of a release says of each fact.
PROBES: Mapping[str, Callable[[Source], Any]] = {
    "connector": lambda s: s.connector,
    "worker": lambda s: s.worker,
    "reader": lambda s: s.reader,
    "scheduler": lambda s: s.scheduler,
    "completions_module": _completions_module,
    "server_request": lambda s: s.parameters("vllm.v1.engine.async_llm", "AsyncLLM.add_request"),
    "agent_metadata": lambda s: s.fields("NixlAgentMetadata"),
    "hash_factors": _hash_factors,
    "connector_version": _connector_version,
    "backend_forms": _backend_forms,
    "question": _question,
    "answer": _answer,
    "params": _params,
    "reader_count": _reader_count,
    "request_metadata": lambda s: s.fields("ReqMeta"),
    "core_output": lambda s: s.parameters(_SCHEDULER, "Scheduler._update_from_kv_xfer_finished")[1],
    "device_table": _device_table,
    "tpu_flag": _tpu_flag,
    "books_of_regions": _books_of_regions,
    "context_sizes": _context_sizes,
    "window_end": _window_end,
    "prefill_count": lambda s: next((n for n in _PREFILL_COUNTS if s.method(s.scheduler, n)), ""),
    "cache_shape": _cache_shape,
    "shape_source": _shape_source,
    "failed_loads": _failed_loads,
    "topology": _topology,
    "has_validation_errors": lambda s: any(
        found.name == "VLLMValidationError" for found in classes(s.release, "vllm.exceptions")
    ),
    "skips_empty_prompts": _skips_empty_prompts,
    "counts_prefix_hits": _says("vllm.v1.request", "Request.__init__", "self.prefill_stats"),
    "lists_block_sizes": lambda s: (
        re.search(r"^BlockSize\b", text(s.release, "vllm.config.cache"), re.MULTILINE) is not None
    ),
    "asks_for_kernel_sizes": lambda s: any(
        s.method(module, "AttentionBackend.get_supported_kernel_block_sizes")
        for module in ("vllm.attention.backends.abstract", "vllm.v1.attention.backend")
    ),
    "forgets_failed_reads": _forgets_failed_reads,
    "forgives_unknown_reads": _says("reader", "_get_new_notifs", "not in self._reqs_to_send"),
    "loads_whole_blocks_only": _says("scheduler", "get_num_new_matched_tokens", "round_down("),
    "asks_for_layout": _has("connector", "get_required_kvcache_layout"),
    "has_host_buffer": _says("worker", "__init__", "self.use_host_buffer = "),
    "chooses_backends": _says("worker", "__init__", "self.nixl_backends = "),
    "has_host_buffer_layout": _says("worker", "__init__", "self.host_buffer_kv_cache_layout = "),
    "checks_device_again": _says("worker", "register_kv_caches", "if self.device_type == 'tpu'"),
    "reserves_for_loads": _says(
        _SCHEDULER, "Scheduler.schedule", "_inflight_prefill_reserved_blocks"
    ),
    "tells_of_rejections": lambda s: bool(
        s.method(_completions_module(s), "OpenAIServingCompletion._create_completion")
    ),
    "counts_loaded_slots": _says(
        _SCHEDULER, "Scheduler._update_waiting_for_remote_kv", "len(block_ids) * self.block_size"
    ),
    "can_answer_later": lambda s: any(
        f"if {name} is None" in s.core("schedule")
        for name in ("num_external_computed_tokens", "ext_tokens")
    ),
    "registers_shared_tensors_once": _says("worker", "register_kv_caches", "seen_base_addresses"),
    "listens_in_scheduler": _has("scheduler", "_nixl_handshake_listener"),
    "listens_by_host": _takes("scheduler", "_nixl_handshake_listener", "host"),
    "books_unprocessed": _says("scheduler", "build_connector_meta", "self._reqs_not_processed"),
    "encodes_metadata": lambda s: "agent_metadata_bytes" in s.fields("NixlHandshakePayload"),
    "meets_one_rank": _says("worker", "_nixl_handshake", "return {p_remote_rank: "),
    "compares_block_sizes_first": _says(
        "worker", "_nixl_handshake", "metadata.block_size <= self.block_size"
    ),
    "topology_has_block_size": lambda s: "block_size" in s.fields("TpKVTopology"),
    "cuts_blocks": lambda s: (
        "self._physical_blocks_per_logical_kv_block = "
        in s.body(s.worker, "__init__") + s.body(s.worker, "register_kv_caches")
    ),
    "backends_tell_state": _has("vllm.v1.attention.backend", "AttentionBackend.is_ssm"),
    "keeps_load_metadata": _says("worker", "__init__", "self._recving_metadata"),
    "divides_own_blocks": _says("worker", "__init__", "self.src_xfer_handles_by_tp_ratio"),
    "books_cuts_of_peers": _says("worker", "__init__", "self._physical_blocks_per_logical: "),
    "has_channels_first": _says("worker", "__init__", "assert is_conv_state_dim_first()"),
    "keeps_aborted_blocks": _says(_SCHEDULER, "Scheduler.finish_requests", "delay_free_blocks"),
    "expands_remote_blocks": _expands_remote_blocks,
    "expands_by_own_cut": lambda s: "local_arange" in s.body(s.worker, _EXPANDS),
    "has_cache_groups": _has_cache_groups,
    "counts_tokens_of_failed": _takes(
        _SCHEDULER, "Scheduler._update_requests_with_invalid_blocks", "num_scheduled_tokens"
    ),
    "counts_one_head": _counts_one_head,
    "reads_its_share": _says("worker", "_validate_remote_agent_handshake", "local_physical_heads"),
    "shares_draft_heads": _has("worker", "_get_head_sharded_draft_regions"),
    "reads_back": _says("scheduler", "__init__", "self.is_bidirectional_kv_xfer_enabled"),
    "reorders_for_cpu": _has("worker", _REORDERS),
    "ends_by_reordering": lambda s: (
        _cache_shape(s) != "keys first" and "index_select(1, " in s.body(s.worker, _REORDERS)
    ),
    "reserves_drafted_blocks": _reserves_drafted_blocks,
    "grants_leases": _says("worker", "__init__", "self._lease_extension = "),
    "lists_drafted_blocks": lambda s: (
        "get_block_ids_for_computed_tokens" not in s.core("_connector_finished")
    ),
    "throttles_prefills": _takes(_SCHEDULER, "Scheduler.schedule", "throttle_prefills"),
    "allocates_before_holding": lambda s: (
        _has_cache_groups(s)
        and "get_new_blocks("
        in s.body(_BLOCK_MANAGERS, "SingleTypeKVCacheManager.allocate_new_computed_blocks")
    ),
    "takes_longest_hit": lambda s: "find_longest_cache_hit_per_group" in s.core("schedule"),
    "frees_blocks_later": _has(_BLOCK_MANAGER, "KVCacheManager.pop_blocks_for_free"),
    "plans_transfers": _plans_transfers,
    "names_layouts": lambda s: (
        "KVCacheLayout[" in s.body(s.worker, "post_process_device_kv_on_receive")
        or "block_stride_per_layer" in s.body(s.worker, "register_kv_caches")
    ),
    # Blocks that a load will fill are not zeroed, nor written to by requests that have ended.
    "spares_loaded_blocks": lambda s: (
        "self.defer_block_free" in s.core("__init__")
        and ("_skip_zero_block_ids" in s.core("schedule") or "skip_zeroing" in s.core("schedule"))
    ),
    "can_sleep": _has("worker", "unregister_kv_caches"),
    "stats": _stats,
    "asks_scheduler_for_stats": _says(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "scheduler_kv_connector_stats = self.connector.get_kv_connector_stats()",
    ),
    "server_arguments": _server_arguments,
    "groups_layers_first": lambda s: (
        "get_global_kv_cache_groups(" in text(s.release, "vllm.v1.engine.core")
    ),
    "takes_kv_rank": lambda s: any(
        "    kv_rank: " in text(s.release, module)
        for module in ("vllm.config.kv_transfer", "vllm.config")
    ),
    "joins_in_groups": lambda s: (
        _has_cache_groups(s)
        and "HMA does not support different remote block size"
        not in s.body(s.worker, "_validate_remote_agent_handshake")
    ),
    "reads_states_by_latents": _says(
        "reader", "_read_blocks_for_req", "self.use_mla and tp_ratio < 0 and (not self._has_mamba)"
    ),
    "side_channel_port": lambda s: _number_in_environment(s, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    "blocks_kept_seconds": _blocks_kept_seconds,
    "pairs_heads_by_layout": _says(
        "worker", "post_process_device_kv_on_receive", "is_block_contiguous"
    ),
}

#: What a record says that no source does.
NAMES = ("release", "generation")


def read(release: str) -> dict[str, Any]:
    """Every fact, as the release's source has it; :class:`NotFound` where its place has moved."""
    source = Source(release)
    return {name: _read_one(name, source) for name in PROBES}


def _read_one(name: str, source: Source) -> Any:
    try:
        return PROBES[name](source)
    except Moved as error:
        return NotFound(str(error))
    except (AssertionError, LookupError, StopIteration, ValueError) as error:
        return NotFound(f"its probe in tests/contract/facts.py finds something else ({error!r})")


def differences(facts: ReleaseFacts, found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a record says otherwise than the source: by fact, the record's and the source's."""
    stated = {f.name: getattr(facts, f.name) for f in fields(facts) if f.name not in NAMES}
    return {n: (stated[n], found[n]) for n in stated if stated[n] != found[n]}
