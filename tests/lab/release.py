"""Where each release keeps what the lab needs, found in the release itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pkgutil
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from . import disguise, standins
from .caches import is_in_rows, layer_name, torch_dtype
from .case import EngineSpec
from .engine_api import MODELS
from .kinds import INDEXER_BYTES
from .layer_kinds import KINDS
from .states import States

_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"
#: A connector that stores blocks in the memory of its host.
_OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26},
}

# What engines import beside what the connector does, where a release has it: a fork should not
# pay for it again.
_PRELOAD = (
    "vllm.config",
    "vllm.forward_context",
    "vllm.sampling_params",
    "vllm.tracing",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.output",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.distributed.parallel_state",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.v1.attention.backends.flash_attn",
    "nixl._api",
    "zmq",
    "msgspec",
)
_BACKENDS = {
    "flash": (("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"),),
    "flashinfer": (("vllm.v1.attention.backends.flashinfer", "FlashInferBackend"),),
    "cpu": (
        ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend"),
        ("vllm.v1.attention.backends.cpu_attn", "TorchSDPABackend"),
    ),
    "triton": (("vllm.v1.attention.backends.triton_attn", "TritonAttentionBackend"),),
    "mla": (("vllm.v1.attention.backends.mla.triton_mla", "TritonMLABackend"),),
    "b12x": (("vllm.v1.attention.backends.b12x", "B12xPagedAttentionBackend"),),
    "aiter": (("vllm.v1.attention.backends.rocm_aiter_fa", "AiterFlashAttentionBackend"),),
    "sparse": (("vllm.v1.attention.backends.mla.flashmla_sparse", "FlashMLASparseBackend"),),
    "indexer": (("vllm.v1.attention.backends.mla.indexer", "DeepseekV32IndexerBackend"),),
    "pallas": (("vllm.v1.attention.backends.pallas", "PallasAttentionBackend"),),
}
# The longest prompt and answer of an engine with several cache groups.
HYBRID_MODEL_TOKENS = 512


class NotInRelease(RuntimeError):
    """This release has nothing like what the case asks for."""


def accepted(callable_: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that `callable_` has a parameter for."""
    parameters = inspect.signature(callable_).parameters
    return {name: value for name, value in values.items() if name in parameters}


def preload() -> None:
    """Imports what every engine process needs, once, before any fork."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    standins.installed_packages()
    standins.cpu_platform()
    standins.torch_names()
    for module in (*_PRELOAD, *_imports_of_connector()):
        importlib.import_module(module)
    standins.model_inspection()
    standins.patient_agents()
    standins.loaded_plugin()
    model_config(EngineSpec())
    _preload_ours()


def _preload_ours() -> None:
    """Imports what patches and players are made of, which is half of what a fork would import.

    Raises:
        ImportError: one of them imports the connector, which kvpatch must be able to come before.
    """
    from kvpatch.patches import load

    load()
    importlib.import_module("tests.lab.player")
    early = [name for name in sys.modules if name.startswith(f"{_PACKAGE}.nixl")]
    if early:
        raise ImportError(f"{early} came before kvpatch: the lab would play no patch of it")


def _imports_of_connector() -> list[str]:
    """What the connector will import, except itself: kvpatch must be able to come before it."""
    own = importlib.util.find_spec(f"{_PACKAGE}.nixl_connector")
    package = importlib.util.find_spec(f"{_PACKAGE}.nixl")
    files = [Path(str(spec.origin)) for spec in (own, package) if spec is not None]
    if package is not None:
        files += sorted(files[-1].parent.glob("*.py"))
    found = dict.fromkeys(
        statement.module
        for file in files
        for statement in ast.parse(file.read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
    )
    return [name for name in found if not name.startswith(f"{_PACKAGE}.nixl")]


@cache
def connector_module() -> Any:
    """The module in which NixlConnector and its worker look names up."""
    try:
        return importlib.import_module(f"{_PACKAGE}.nixl_connector")
    except ModuleNotFoundError as error:
        if error.name != f"{_PACKAGE}.nixl_connector":
            raise
        return importlib.import_module(f"{_PACKAGE}.nixl")


def connector_class(spec: EngineSpec) -> Any:
    """What an engine of `spec` makes of its connector's name."""
    nixl = connector_module().NixlConnector
    if not spec.in_multi:
        return nixl
    return importlib.import_module(f"{_PACKAGE}.multi_connector").MultiConnector


def nixl_of(connector: Any) -> Any:
    """The NixlConnector that is meant: itself, or the only one of a MultiConnector."""
    return getattr(connector, "_connectors", (connector,))[0]


@cache
def loads_behind_models_part() -> bool:
    """Whether the release's runner has a step's reads begin once the model has run (from 0.29)."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "has_sync_kv_loads" in SchedulerOutput.__dataclass_fields__


def worker_modules() -> list[Any]:
    """All loaded modules of the connector: each has its own imported names.

    By its files: who looks at every module there is copies the pages of thousands into a fork.
    """
    connector = connector_module()
    files = pkgutil.iter_modules(getattr(connector, "__path__", ()), f"{connector.__name__}.")
    found = (sys.modules.get(file.name) for file in files)
    return [connector, *(module for module in found if module is not None)]


def backend(family: str) -> type[Any]:
    """The release's attention backend class of `family`."""
    if family == "flashinfer":
        standins.flashinfer_package()
    if family == "pallas":
        standins.tpu_package()
    for module, name in _BACKENDS[family]:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise NotInRelease(f"no attention backend for {family!r}")


def layout_name(spec: EngineSpec) -> str:
    """`spec.layout` in the words of the release."""
    from_029 = not hasattr(backend(spec.family), "get_kv_cache_shape")
    if from_029:
        outer = "BL" if spec.allocation == "kvcached_rows" else "LB"
        inner = {"NHD": "NHC", "HND": "HNC"}.get(spec.layout)
        return outer + inner if inner else spec.layout
    if spec.layout not in ("NHD", "HND"):
        raise NotInRelease(f"layout {spec.layout}: this release knows NHD and HND")
    return spec.layout


def use_layout(layout: str) -> None:
    """Makes `layout` the process's KV cache layout (<= 0.28, where it is one)."""
    from vllm.v1.attention.backends import utils

    if not hasattr(utils, "set_kv_cache_layout"):
        return
    utils.set_kv_cache_layout(layout)
    clear = getattr(utils.get_kv_cache_layout, "cache_clear", None)
    if clear is not None:
        clear()


def shuffle(is_on: bool) -> None:
    """Sets the variable by which AITER's FlashAttention shuffles keys (0.15 on), as on ROCm."""
    os.environ["VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"] = str(int(is_on))
    ops = (
        importlib.import_module("vllm._aiter_ops") if is_on else sys.modules.get("vllm._aiter_ops")
    )
    if ops is not None:
        ops.rocm_aiter_ops.is_shuffle_kv_cache_enabled = classmethod(lambda cls: is_on)


@cache
def _model_folder(
    layers: int, kv_heads: int, head_dim: int, dtype: str, mla: bool, others: tuple[int, int]
) -> str:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8 * head_dim,
        "intermediate_size": 64,
        "num_attention_heads": max(8, kv_heads),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "vocab_size": 128,
        "max_position_embeddings": 8192,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if mla:
        rope = head_dim // 4
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": head_dim - rope,
            "q_lora_rank": None,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": max(8, kv_heads),
            "first_k_dense_replace": layers,
        }
        del config["head_dim"]
    # As MiMo-V2 and Gemma 4 name the heads of windows, and of full attention.
    names = ("swa_num_key_value_heads", "num_global_key_value_heads")
    config |= {name: heads for name, heads in zip(names, others, strict=True) if heads}
    # One path for P and D: the model's name is part of what they compare.
    shapes = "-".join(map(str, (layers, kv_heads, *others, head_dim)))
    name = f"{config['model_type']}-{shapes}-{dtype}"
    folder = Path(os.environ[MODELS]) / name
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed into place: the other engine may be reading it.
    draft = folder / f"config.json.{os.getpid()}"
    draft.write_text(json.dumps(config))
    draft.replace(folder / "config.json")
    return str(folder)


@lru_cache
def _model_config(
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    mla: bool,
    max_tokens: int,
    others: tuple[int, int] = (0, 0),
) -> Any:
    """A model's configuration.

    Args:
        others: the KV heads of layers with windows, and of those without; 0 for the model's.
    """
    from vllm.config import ModelConfig

    folder = _model_folder(layers, kv_heads, head_dim, dtype, mla, others)
    wanted = {
        "model": folder,
        "tokenizer": folder,
        "skip_tokenizer_init": True,
        "tokenizer_mode": "auto",
        "trust_remote_code": False,
        "task": "auto",
        "dtype": dtype,
        "seed": 0,
        "max_model_len": max_tokens,
    }
    return ModelConfig(**accepted(ModelConfig, wanted))


def model_config(spec: EngineSpec) -> Any:
    dtype = "bfloat16" if spec.dtype == "fp8" else spec.dtype
    # A plan has room for one request of the greatest length at least.
    max_tokens = 8192
    if spec.is_hybrid or spec.mixes_kinds:
        max_tokens = max(HYBRID_MODEL_TOKENS, spec.state_tokens if spec.keeps_states else 0)
    layers = spec.layers - (spec.draft_shape is not None)
    heads = [shape[0] if shape else 0 for shape in (spec.window_shape, spec.full_shape)]
    return _model_config(
        layers,
        spec.kv_heads,
        spec.head_dim,
        dtype,
        spec.family == "mla",
        max_tokens,
        (heads[0], heads[1]),
    )


def _load_failure_policy(spec: EngineSpec) -> dict[str, str]:
    policy = spec.load_failure_policy
    return {"kv_load_failure_policy": policy} if policy else {}


def vllm_config(spec: EngineSpec, engine_id: str, role: str, extra: dict[str, Any]) -> Any:
    """The release's own configuration objects for one engine."""
    from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, VllmConfig

    cache = CacheConfig(
        **accepted(
            CacheConfig,
            {
                "block_size": spec.block_tokens,
                "gpu_memory_utilization": 0.9,
                "swap_space": 0,
                "cache_dtype": "fp8" if spec.dtype == "fp8" else "auto",
            },
        )
    )
    cache.num_gpu_blocks = spec.planned_blocks
    for dtype in {KINDS[name].cache_dtype for name in spec.kinds if name in KINDS} - {""}:
        cache.cache_dtype = dtype
    if spec.has_state:
        config = model_config(spec).hf_text_config  # one for many cases
        config.mamba_n_groups = spec.states.groups
    if spec.state_mode != "none":
        cache.mamba_cache_mode = spec.state_mode
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
        **_load_failure_policy(spec),
    }
    outer = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [nixl, *[_OFFLOADING] * spec.stores_blocks]},
    }
    transfer = KVTransferConfig(**(outer if spec.in_multi else nixl), engine_id=engine_id)
    config = VllmConfig(
        model_config=model_config(spec),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        kv_transfer_config=transfer,
    )
    config.parallel_config.tensor_parallel_size = 1 if spec.has_stages else spec.tp_size
    config.parallel_config.pipeline_parallel_size = spec.tp_size if spec.has_stages else 1
    config.parallel_config.world_size = spec.tp_size
    if spec.contexts > 1:
        config.parallel_config.decode_context_parallel_size = spec.contexts
    if spec.is_hybrid or spec.mixes_kinds:
        cache.num_gpu_blocks_override = spec.planned_blocks
    if spec.has_core:  # the engine's own defaults, which <= 0.11.0 its arguments set
        cache.enable_prefix_caching = not spec.keeps_states or spec.state_mode != "none"
        for name in ("enable_chunked_prefill", "chunked_prefill_enabled"):
            if hasattr(config.scheduler_config, name):
                setattr(config.scheduler_config, name, True)
    if hasattr(config.scheduler_config, "async_scheduling"):  # from 0.10.1
        config.scheduler_config.async_scheduling = spec.schedules_ahead
    config.scheduler_config.disable_hybrid_kv_cache_manager = not spec.is_hybrid
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = layout_name(spec)
    if spec.draft_shape is not None:
        config.speculative_config = _drafting(spec)
    layers = {layer_name(i): _backend_of(spec, i) for i in range(spec.layers)}
    standins.model_layers(config, layers)
    return config


def _drafting(spec: EngineSpec) -> Any:
    """Of a draft model, made without the checks of a real one: there are no weights."""
    from vllm.config import SpeculativeConfig

    assert spec.draft_shape is not None
    found = object.__new__(SpeculativeConfig)
    vars(found).update(
        method="draft_model",
        num_speculative_tokens=max(1, spec.lookahead_tokens),
        num_speculative_tokens_per_batch_size=None,
        parallel_drafting=False,
        draft_model_config=_model_config(1, *spec.draft_shape, spec.dtype, False, 8192),
    )
    return found


def _backend_of(spec: EngineSpec, layer: int) -> Any:
    if spec.is_state(layer):
        return _state_backend(spec.states_of(layer).mamba_type)
    if spec.kind_of(layer):
        return KINDS[spec.kind_of(layer)].backend()
    if spec.has_indexer:
        return backend("indexer" if spec.is_indexer(layer) else "sparse")
    if spec.is_draft(layer):
        return backend("flash")
    return disguise.backend(backend(spec.family))


def _state_backend(mamba_type: str) -> Any:
    backends = "vllm.v1.attention.backends"
    if mamba_type == "SHORT_CONV":
        return importlib.import_module(f"{backends}.short_conv_attn").PleShortConvAttentionBackend
    return importlib.import_module(f"{backends}.mamba2_attn").Mamba2AttentionBackend


def _layer_spec(spec: EngineSpec, layer: int) -> Any:
    from vllm.v1 import kv_cache_interface as interface

    if spec.is_state(layer):
        return _state_spec(spec, spec.states_of(layer))
    if spec.kind_of(layer):
        return _spec_of_kind(spec, layer)
    window_tokens = spec.window_of(layer)
    heads, channels = spec.shape_of(layer)
    wanted = {
        "block_size": spec.block_tokens,
        "num_kv_heads": heads,
        "head_size": channels,
        "dtype": torch_dtype(spec.dtype),
        "use_mla": spec.family == "mla" and not spec.is_draft(layer),
        "sliding_window": window_tokens or None,
    }
    kind = interface.SlidingWindowSpec if window_tokens else interface.FullAttentionSpec
    if spec.reference_window:
        kind, wanted["rswa_window"] = interface.RSWASpec, spec.reference_window
    if wanted["use_mla"]:
        kind = getattr(interface, "MLAAttentionSpec", kind)
    if spec.has_indexer:  # as layers of MLA say, and indexers do not
        wanted["cache_dtype_str"] = "auto"
    if spec.is_indexer(layer):
        del wanted["cache_dtype_str"]
        wanted |= {"head_size": INDEXER_BYTES, "dtype": torch.uint8}
        if hasattr(interface, "SparseCacheRole"):
            wanted["cache_role"] = interface.SparseCacheRole.INDEXER
    found = kind(**accepted(kind, wanted))
    customize = getattr(backend(spec.family), "customize_spec", None)
    return customize(found) if customize and spec.has_slots else found


def _spec_of_kind(spec: EngineSpec, layer: int) -> Any:
    """As the model's layer states it, and as the backend would have it."""
    from vllm.v1 import kv_cache_interface as interface

    kind = KINDS[spec.kind_of(layer)]
    made = getattr(interface, kind.spec)
    wanted = {"block_size": spec.block_tokens_of(layer), **kind.fields(spec)}
    customize = getattr(kind.backend(), "customize_spec", None)  # from 0.29
    found = made(**accepted(made, wanted))
    return customize(found) if customize else found


def state_spec(spec: EngineSpec) -> Any:
    """Of every other layer, where these have recurrent state; else None."""
    return _state_spec(spec, spec.states) if spec.has_state else None


def _state_spec(spec: EngineSpec, states: States) -> Any:
    from vllm.v1 import kv_cache_interface as interface

    shapes = states.shapes(spec.tp_size)
    wanted = {
        "shapes": shapes,
        "dtypes": (torch_dtype(spec.state_dtype or spec.dtype),) * len(shapes),
        "mamba_type": _mamba_type(states.mamba_type),
        "tp_replicated": states.is_whole,
        "block_size": spec.state_tokens if spec.state_mode == "none" else spec.block_tokens,
        "mamba_cache_mode": spec.state_mode,
        "num_speculative_blocks": spec.drafted_states,
        "page_size_padded": _layer_spec(spec, spec.attention_layer).page_size_bytes,
    }
    return interface.MambaSpec(**accepted(interface.MambaSpec, wanted))


def _mamba_type(name: str) -> Any:
    """Of a state's kind, as the release's layers state it."""
    try:
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    except ImportError:  # <= 0.11
        return name.lower()
    from vllm.v1 import kv_cache_interface as interface

    stated = interface.MambaSpec.__dataclass_fields__["mamba_type"].default
    return name.lower() if isinstance(stated, str) else MambaAttentionBackendEnum[name]


def kv_cache_config(spec: EngineSpec, config: Any) -> Any:
    """The plan that the engine core would hand to both sides of the connector."""
    if spec.mixes_kinds and not spec.is_hybrid:
        return _planned(spec, config)
    if not spec.is_hybrid:
        has_named = not hasattr(backend(spec.family), "get_kv_cache_shape")
        by_kvcached = spec.allocation in ("kvcached_rows", "kvcached_apart")
        is_placed = has_named and (by_kvcached or spec.has_slots)
        return _placed(spec, config) if is_placed else _one_group(spec)
    plan = _planned(spec, config)
    sizes = block_tokens_of_groups(plan)
    planned = {n: sizes[i] for i, g in enumerate(plan.kv_cache_groups) for n in g.layer_names}
    expected = {layer_name(i): spec.block_tokens_of(i) for i in range(spec.layers)}
    if planned != expected:
        raise NotInRelease(f"blocks of {planned} tokens are planned, and {expected} expected")
    # As the engine core does it, from 0.30 on without rings. 0.29 does it with them, after which
    # workers of a process of their own still have the other number.
    specs = [group.kv_cache_spec for group in plan.kv_cache_groups]
    hits = [n for n, of in zip(sizes, specs, strict=True) if getattr(of, "prefix_cacheable", True)]
    config.cache_config.block_size = min(hits or sizes)
    return plan


def block_tokens_of_groups(plan: Any) -> list[int]:
    return [group.kv_cache_spec.block_size for group in plan.kv_cache_groups]


def slots(spec: EngineSpec, plan: Any) -> list[int]:
    """For each layer the number of the memory that it shares, from the plan."""
    if not spec.is_hybrid or is_in_rows(plan):
        return [spec.content_of(layer) for layer in range(spec.layers)]
    # Tensor i belongs to the i-th layers of all groups (in so many words <= 0.28,
    # as overlaid address ranges from 0.29 on).
    place = {name: i for group in plan.kv_cache_groups for i, name in enumerate(group.layer_names)}
    found = [place[layer_name(layer)] for layer in range(spec.layers)]
    for i, tensor in enumerate(plan.kv_cache_tensors):
        if {found[_number(name)] for name in getattr(tensor, "shared_by", ())} - {i}:
            raise NotInRelease(f"the release shares tensors in another way: {tensor}")
    return found


def groups_of_layers(spec: EngineSpec, plan: Any) -> list[int]:
    """For each layer the number of its cache group."""
    group = {n: i for i, g in enumerate(plan.kv_cache_groups) for n in g.layer_names}
    return [group[layer_name(layer)] for layer in range(spec.layers)]


def _number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def _planned(spec: EngineSpec, config: Any) -> Any:
    """The release's own plan for layers of several kinds."""
    from vllm.v1.core import kv_cache_utils

    specs = {layer_name(i): _layer_spec(spec, i) for i in range(spec.layers)}
    memory_bytes = 1 << 40  # the number of blocks is prescribed
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        (plan,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [memory_bytes])
        return plan
    from vllm.v1.core import kv_cache_planning  # from 0.33

    groups = kv_cache_planning.get_global_kv_cache_groups(config, [specs])
    (plan,) = kv_cache_planning.get_kv_cache_configs(config, [specs], [memory_bytes], groups)
    return plan


def _placed(spec: EngineSpec, config: Any) -> Any:
    """The release's own plan for layers of one kind, of as many blocks as the case has."""
    from vllm.v1.core import kv_cache_utils

    planning = kv_cache_utils
    if not hasattr(planning, "get_kv_cache_config_from_groups"):
        from vllm.v1.core import kv_cache_planning as planning  # from 0.33

    specs = {layer_name(i): _layer_spec(spec, i) for i in range(spec.layers)}
    groups = planning.get_kv_cache_groups(config, specs)
    pages_bytes = sum(of_layer.page_size_bytes for of_layer in specs.values())
    return planning.get_kv_cache_config_from_groups(
        config, groups, pages_bytes * spec.planned_blocks
    )


def _one_group(spec: EngineSpec) -> Any:
    from vllm.v1 import kv_cache_interface as interface

    names = [layer_name(i) for i in range(spec.layers)]
    layer_spec = _layer_spec(spec, 0)
    page_bytes = layer_spec.page_size_bytes
    size_bytes = page_bytes * spec.planned_blocks
    tensor = interface.KVCacheTensor
    if "shared_by" in inspect.signature(tensor).parameters:
        count = spec.tensors if spec.allocation == "shared_tensors" else spec.layers
        tensors = [tensor(size=size_bytes, shared_by=names[i::count]) for i in range(count)]
    else:
        apart = layout_name(spec).startswith("L")
        placed = {
            "size": size_bytes * spec.layers,
            "layers": names,
            "layer_stride": size_bytes if apart else page_bytes,
            "block_stride": page_bytes if apart else page_bytes * spec.layers,
        }
        tensors = [tensor(**accepted(tensor, placed))]
    return interface.KVCacheConfig(
        num_blocks=spec.planned_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[interface.KVCacheGroupSpec(names, layer_spec)],
    )


def is_package() -> bool:
    """Whether the connector is a package (from 0.20 on)."""
    return hasattr(connector_module(), "__path__")
