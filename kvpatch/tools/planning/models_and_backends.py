"""The caches of known models, from their config.json, and of known attention backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.core.releases import ReleaseFacts
from kvpatch.geometry.dimension_order import DimensionOrder
from kvpatch.peer.engine_description import FULL, LATENT, WINDOW, Caches, Layer
from kvpatch.tools.planning.arguments import DESCRIBE, as_mapping, known
from kvpatch.worker.local_geometry import KernelBlockSizes
from kvpatch.worker.release_worker import LATENT as LATENT_ORDER
from kvpatch.worker.release_worker import LATENT_HEADS, PACKED

#: Where config.json gives a window and does not name the layers that have it: each n-th layer has
#: full attention, or none has.
_FULL_LAYERS = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "MistralForCausalLM": 0}


@dataclass(frozen=True)
class Model:
    """The entries of a config.json that say what caches are.

    Attributes:
        head_dim: of keys and of values; for latents, the whole width.
        windows: the sliding window of each layer in tokens; 0 for full attention.
    """

    kv_heads: int
    heads: int
    head_dim: int
    dtype: str
    is_mla: bool
    windows: tuple[int, ...]

    def kind(self, number: int) -> str:
        """The class of a layer's KVCacheSpec."""
        return LATENT if self.is_mla else WINDOW if self.windows[number] else FULL

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block table, as vLLM's allocator makes them of two kinds of layers."""
        kinds: dict[int, list[int]] = {}
        for number, window in enumerate(self.windows):
            kinds.setdefault(window, []).append(number)
        sizes = [len(of_kind) for of_kind in kinds.values()]
        size = max(sizes) if max(sizes) < 1.25 * min(sizes) else min(sizes)
        return tuple(
            tuple(of_kind[first : first + size])
            for of_kind in kinds.values()
            for first in range(0, len(of_kind), size)
        )


def caches_of(
    model: Model, backend: str, tokens: int, dtypes: tuple[str, str], ranks: int
) -> Caches:
    """Makes the caches of the first rank, of blocks of so many tokens."""
    layers = tuple(
        Layer(
            *(f"layer.{number}", model.kind(number), backend, tokens, 0, dtypes[1:]),
            kv_heads=1 if model.is_mla else max(1, model.kv_heads // ranks),
            head_dim=model.head_dim,
            window=window,
        )
        for number, window in enumerate(model.windows)
    )
    groups = tuple(tuple(f"layer.{number}" for number in group) for group in model.groups)
    return Caches(tokens, 0, "", model.heads, model.kv_heads, *dtypes, layers, groups)


def find_config(model: str, given: Path | None) -> Path:
    """Finds a model's config.json: the given one, a folder's, or the hub cache's newest."""
    cache, home = settings.variable("HF_HUB_CACHE"), settings.variable("HF_HOME")
    hub = Path(cache) if cache else Path(home or Path.home() / ".cache" / "huggingface") / "hub"
    snapshots = (hub / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json")
    newest = sorted(snapshots, key=lambda path: path.stat().st_mtime)[-1:]
    folder = given or Path(model)
    candidates: list[Path] = [folder, folder / "config.json", *([] if given else newest)]
    for path in candidates:
        if path.is_file():
            return path
    reason = f"there is no config.json of {folder}, and none in the hub cache ({hub})"
    raise BadOptions(reason, "give it, or its folder, with --model-config")


def read_model(path: Path) -> Model:
    """Reads the config.json of a known model; raises :class:`BadOptions` for another one."""
    try:
        content = as_mapping(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadOptions(f"{path}: {error}", "give the model's config.json") from None
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else str(names)
    quantization = as_mapping(content.get("quantization_config") or {}, str(path))
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    what = f"a checkpoint with a KV cache of its own ({scheme})" if scheme else ""
    if name not in known("architectures") or content.get("global_head_dim"):
        what = f"architecture {name}"
    if what:
        raise BadOptions(f"{path}: not planned for: {what}", DESCRIBE)
    heads = _number(content, path, "num_attention_heads")
    is_mla = content.get("kv_lora_rank") is not None
    if is_mla:
        parts = ("kv_lora_rank", "qk_rope_head_dim")
        kv_heads, width = heads, sum(_number(content, path, part) for part in parts)
    else:
        kv_heads = _number(content, path, "num_key_value_heads", heads)
        has_width = content.get("head_dim") is not None
        width = _number(content, path, "head_dim" if has_width else "hidden_size")
        width = width if has_width else width // heads
    dtype = content.get("dtype") or content.get("torch_dtype") or "float32"
    return Model(
        kv_heads=kv_heads,
        heads=heads,
        head_dim=width,
        dtype=str(dtype).removeprefix("torch."),
        is_mla=is_mla,
        windows=_windows(content, path, _FULL_LAYERS.get(name)),
    )


def _number(content: Mapping[str, Any], path: Path, name: str, default: int = 0) -> int:
    found = content.get(name)
    found = default if found is None else found
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise BadOptions(f"{path} does not say {name}", "write it into it")
    return found


def _windows(content: Mapping[str, Any], path: Path, every: int | None) -> tuple[int, ...]:
    """The window of each layer, by the entries that Transformers has for it."""
    layers = _number(content, path, "num_hidden_layers")
    window, kinds = content.get("sliding_window"), content.get("layer_types") or ()
    if kinds and (len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}):
        strange = ", ".join(sorted(map(str, set(kinds))))
        raise BadOptions(f"{path}: not planned for: {len(kinds)} layers of {strange}", DESCRIBE)
    if not window or content.get("use_sliding_window") is False:
        return (0,) * layers
    window = _number(content, path, "sliding_window")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    every = every or content.get("sliding_window_pattern", every)
    if every is None:
        what = f"a window of {window} in layers that it does not name"
        raise BadOptions(f"{path}: not planned for: {what}", DESCRIBE)
    return tuple(0 if every and (n + 1) % every == 0 else window for n in range(layers))


# --- attention backends, from vLLM 0.26 on (tests/lab/test_planned_backends.py) ---------------


@dataclass(frozen=True)
class Backend:
    """One attention backend.

    Attributes:
        device: "cuda" for the backends of CUDA and ROCm alike.
        is_mla: True if it holds latents.
        exact: the kernel blocks that it takes; empty where it takes multiples of a number.
        default_tokens: of a block, by default.
        fp8: the words of ``--kv-cache-dtype`` for items of one byte that it takes.
    """

    name: str
    device: str = "cuda"
    is_mla: bool = False
    exact: tuple[int, ...] = ()
    default_tokens: int = 16
    fp8: tuple[str, ...] = ("fp8", "fp8_e4m3")

    def kernel_sizes(self, facts: ReleaseFacts) -> KernelBlockSizes:
        """Returns the sizes of kernel blocks that a release cuts blocks into."""
        base = 32 if self.device == "cpu" and facts.names_layouts else 16
        return KernelBlockSizes((self.exact,), (() if self.exact else (base,),))

    def order(self, facts: ReleaseFacts) -> DimensionOrder:
        """Returns the meanings of the dimensions of a layer's tensor."""
        latent = LATENT_HEADS if facts.names_layouts else LATENT_ORDER
        return latent if self.is_mla else PACKED


_WITH_E5M2 = ("fp8", "fp8_e4m3", "fp8_e5m2")
BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN"),
        Backend("FLASHINFER", exact=(16, 32, 64), fp8=_WITH_E5M2),
        Backend("TRITON_ATTN", fp8=_WITH_E5M2),
        Backend("CPU_ATTN", "cpu", default_tokens=128, fp8=_WITH_E5M2),
        Backend("TRITON_MLA", is_mla=True),
        Backend("FLASHMLA", is_mla=True, exact=(64,), default_tokens=64),
        Backend("FLASH_ATTN_MLA", is_mla=True, fp8=()),
    )
}
#: By device, the backend that vLLM most likely chooses for keys and values.
_DEFAULTS = {"cpu": "CPU_ATTN", "cuda": "FLASH_ATTN"}


def backend_named(name: str | None, device: str, *, is_mla: bool) -> Backend:
    """Finds a backend by its name, or the default one; raises :class:`BadOptions` for others."""
    if name is None and not is_mla:
        name = _DEFAULTS.get(device)
    if name is None:
        raise BadOptions(
            f"not planned for: the attention backend that vLLM chooses on this {device}",
            "write attention-backend into the section kvpatch, and block-size (the log of vLLM "
            'says "Using ... backend")',
        )
    found = BACKENDS.get(name.upper())
    if found is None or found.is_mla != is_mla:
        what = "latents (MLA)" if is_mla else "keys and values"
        known = (one.name for one in BACKENDS.values() if one.is_mla == is_mla)
        raise BadOptions(
            f"not planned for: {what} of the attention backend {name}",
            f"use one of {', '.join(known)}",
        )
    return found
