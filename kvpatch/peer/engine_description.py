"""The description of an engine that ``kvpatch plan`` reads.

``kvpatch describe`` makes it of an engine that is not started. A running engine publishes it in its
metrics (``kvpatch_description``), packed into one label; it names no address and no file but the
model.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvpatch.core import settings
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import one_line
from kvpatch.core.version import __version__
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.peer import peer_hash
from kvpatch.peer.peer_hash import own_factors
from kvpatch.worker.recurrent_state import StateDivision, state_division
from kvpatch.worker.release_worker import ReleaseWorker

#: The entry that holds the schema's number, by which a description is told from arguments.
SCHEMA = "kvpatch_description"
NUMBER = 1
#: The entry of ``about`` that a running engine has.
RUNNING = "running"

#: KVCacheSpec classes by what a block of theirs holds; caches of others are not planned for.
FULL, WINDOW = "FullAttentionSpec", "SlidingWindowSpec"
LATENT, STATE = "MLAAttentionSpec", "MambaSpec"
KINDS = frozenset((FULL, WINDOW, LATENT, STATE))
#: Bytes of one number, by the types that are not cut to a byte.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layer:
    """The cache of one layer on the first rank.

    Attributes:
        kind: the class of its KVCacheSpec.
        page_bytes: of one block, with padding; 0 where vLLM was not asked.
        value_dim: the width of values; 0 where there are none apart.
        window: in tokens; 0 for full attention.
        parts: by recurrent state, the bytes of a unit, and the units of each part that all ranks
            have together, with True for a part that each rank has whole.
    """

    name: str
    kind: str
    backend: str
    block_tokens: int
    page_bytes: int
    dtypes: tuple[str, ...]
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[int, tuple[tuple[int, bool], ...]], ...] = ()

    @property
    def division(self) -> StateDivision:
        """The way in which all ranks share out its states."""
        parts = ((size, tuple(Part(*one) for one in of_all)) for size, of_all in self.parts)
        return StateDivision(tuple(SharedState(*one) for one in parts), reason="")


@dataclass(frozen=True)
class Caches:
    """The caches of the first rank.

    Attributes:
        kernel_tokens: of the blocks that kernels take; 0 where the attention backend decides.
        heads, kv_heads: of the whole model.
        cache_dtype: of a token's keys and values.
        groups: the names of the layers of each block table.
    """

    block_tokens: int
    kernel_tokens: int
    layout: str
    heads: int
    kv_heads: int
    model_dtype: str
    cache_dtype: str
    layers: tuple[Layer, ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def attention(self) -> dict[int, Layer]:
        """The layers whose blocks hold tokens, by their numbers."""
        return {n: one for n, one in enumerate(self.layers) if one.kind != STATE}

    @property
    def states(self) -> dict[int, Layer]:
        """The layers with recurrent states, by their numbers."""
        return {n: one for n, one in enumerate(self.layers) if one.kind == STATE}

    @property
    def first(self) -> Layer:
        """The first layer whose blocks hold tokens: all of them have caches of one shape."""
        return next(iter(self.attention.values()))

    @property
    def is_mla(self) -> bool:
        """True if blocks hold latents."""
        return self.first.kind == LATENT

    @property
    def has_groups(self) -> bool:
        """True if layers have several block tables, or one with a window."""
        return bool(self.states) or any(one.window for one in self.attention.values())

    @property
    def numbered_groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the layers of each block table."""
        numbers = {layer.name: number for number, layer in enumerate(self.layers)}
        return tuple(tuple(numbers[name] for name in group) for group in self.groups)


def caches_of(
    config: Any,
    specs: Mapping[str, Any],
    groups: Iterable[Any],
    layers: Mapping[str, Any],
    blocks: tuple[int, int, str],
    facts: ReleaseFacts,
) -> Caches:
    """Reads the caches of a rank from what its vLLM has planned.

    Args:
        specs: of the layers that have caches.
        layers: the model's, as vLLM built them.
        blocks: tokens of a block and of a kernel block, and the name of the layout.
    """
    model, parallel = config.model_config, config.parallel_config
    asked, dtype = str(config.cache_config.cache_dtype), _name(model.dtype)
    tokens, kernel_tokens, layout = blocks
    return Caches(
        block_tokens=tokens,
        kernel_tokens=kernel_tokens,
        layout=layout,
        heads=model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size,
        kv_heads=model.get_total_num_kv_heads(),
        model_dtype=dtype,
        cache_dtype=dtype if asked == "auto" else asked,
        layers=tuple(
            _layer(config, name, layer.get_attn_backend().get_name(), specs[name], facts)
            for name, layer in layers.items()
            if name in specs
        ),
        groups=tuple(tuple(n for n in group.layer_names if n in specs) for group in groups),
    )


def _layer(config: Any, name: str, backend: str, spec: Any, facts: ReleaseFacts) -> Layer:
    kind = type(spec).__name__
    of_all = (name, kind, backend, spec.block_size, spec.page_size_bytes)
    if kind != STATE:
        return Layer(
            *of_all,
            dtypes=(_name(spec.dtype),),
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            value_dim=getattr(spec, "head_size_v", spec.head_size),
            window=getattr(spec, "sliding_window", None) or 0,
        )
    ranks = config.parallel_config.tensor_parallel_size
    division = state_division(spec, ranks, config.model_config.hf_text_config, facts)
    return Layer(
        *of_all,
        dtypes=tuple(map(_name, spec.dtypes)),
        shapes=tuple(map(tuple, spec.shapes)),
        parts=tuple(
            (s.unit_bytes, tuple((part.units, part.is_copied) for part in s.parts))
            for s in division.states
        ),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --- a running engine -----------------------------------------------------------------------

#: The options, by the configuration that has them, that a plan reads of a running engine.
_OPTIONS = {
    "model_config": ("model", "revision", "code_revision"),
    "parallel_config": (
        *("tensor_parallel_size", "pipeline_parallel_size"),
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
    ),
    "cache_config": ("enable_prefix_caching",),
    "scheduler_config": ("disable_hybrid_kv_cache_manager",),
}
#: The settings of the connector that a plan reads; the rest is each engine's own.
TRANSFER = (
    *("kv_connector", "kv_role", "kv_buffer_device", "kv_connector_module_path"),
    *("enable_permute_local_kv", "kv_connector_extra_config"),
)
_EXTRA = ("enforce_handshake_compat", "enable_cross_layers_blocks", "backends")
_VARIABLES = (
    *("VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT", "ENABLE_KVCACHED", settings.ENABLE),
    *(settings.ACCEPT, settings.GENERATION, settings.HOST_BUFFER, settings.TRANSFER),
    *(settings.PEER_BLOCK_SIZE, settings.PEER_KEYS, settings.PEER_LAYOUT),
)
#: Of JSON, from an API server; a model of 1,000 layers has 0.3 MB.
_MOST_BYTES = 16 * 1024**2


def published(release: ReleaseWorker) -> str | None:
    """Packs the description of this worker's engine, once it has registered.

    Returns:
        None on ranks but the first, and of caches that no plan knows.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    worker, facts = release.worker, release.facts
    config, kernel_tokens = worker.vllm_config, int(worker.block_size)
    specs = {name: release.spec_of(name) for name in worker._layer_specs}
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    kinds = {type(spec).__name__ for spec in specs.values()}
    is_first = not (worker.tp_rank or config.parallel_config.rank)  # of all stages of a pipeline
    if not is_first or not specs or kinds - KINDS or specs.keys() - layers.keys():
        return None
    tokens = kernel_tokens * release.kernel_blocks_per_block
    blocks = tokens, kernel_tokens, str(release.stated_layout)
    groups = worker.kv_cache_config.kv_cache_groups
    caches = caches_of(config, specs, groups, layers, blocks, facts)
    own = own_factors(release)
    hashed = None if own is None else {n: own.values[n] for n in facts.hash_factors}
    found = content_of(facts, _options(config), _variables(), caches)
    found["about"][RUNNING] = True
    if own is not None and hashed is not None:
        hashed.setdefault(peer_hash.MODE, own.values[peer_hash.MODE])
        found["hash"] = {"digest": own.digest, "factors": hashed}
    return packed(found)


def packed(content: Mapping[str, Any]) -> str:
    """Packs a description into a metric's label."""
    return base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()


def unpacked(text: str) -> Mapping[str, Any]:
    """Reads a description that an engine has published.

    Raises:
        ValueError: it is none.
    """
    unpacking = zlib.decompressobj()
    try:
        content = json.loads(unpacking.decompress(base64.b64decode(text), _MOST_BYTES))
        content = _in_lines(content)
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict) or not unpacking.eof:
        raise ValueError("no JSON object, or too large a one")
    return content


def _in_lines(found: Any) -> Any:
    """Makes one short line of each text: whoever answers at a URL may have written it."""
    if isinstance(found, dict):
        return {one_line(name): _in_lines(one) for name, one in found.items()}
    if isinstance(found, list):
        return [*map(_in_lines, found)]
    return one_line(found) if isinstance(found, str) else found


def content_of(
    facts: ReleaseFacts, options: Mapping[str, Any], env: Mapping[str, str], caches: Caches
) -> dict[str, Any]:
    """Makes the JSON object of a description, without its hash, for this process's platform."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    device = "rocm" if current_platform.is_rocm() else str(current_platform.device_type)
    about: dict[str, Any] = {"release": facts.release, "platform": device}
    if caches.attention:
        about["attention-backend"] = caches.first.backend
    if device == "cpu":
        about["amx"] = torch.cpu._is_amx_tile_supported()
    return {
        SCHEMA: NUMBER,
        "kvpatch": __version__,
        "vllm": vllm.__version__,
        "options": dict(options),
        "about": about,
        "env": dict(env),
        "caches": asdict(caches),
        "hash": None,
    }


def _options(config: Any) -> dict[str, Any]:
    """The options of a running engine, as its configuration has them."""
    found = {
        name: getattr(getattr(config, part), name)
        for part, names in _OPTIONS.items()
        for name in names
    }
    found["kv_cache_dtype"] = str(config.cache_config.cache_dtype)
    found["enable_lora"] = config.lora_config is not None
    drafting, transfer = config.speculative_config, config.kv_transfer_config
    if drafting is not None:
        found["speculative_config"] = {"method": drafting.method, "model": drafting.model}
    of_transfer = {name: getattr(transfer, name) for name in TRANSFER}
    extra = of_transfer["kv_connector_extra_config"] or {}
    of_transfer["kv_connector_extra_config"] = {n: extra[n] for n in _EXTRA if n in extra}
    found["kv_transfer_config"] = {name: one for name, one in of_transfer.items() if one}
    return {name: one for name, one in found.items() if one not in (None, {})}


def _variables() -> dict[str, str]:
    return {n: v for n, v in settings.engine_variables().items() if n in _VARIABLES}
