"""The caches of a known model, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions, CannotPlan
from kvpatch.tools.planning.description import FULL, LATENT, WINDOW, Caches, Layer

#: The cure of each status 2: vLLM itself knows more than a plan.
DESCRIBE = "run kvpatch describe on a machine with that vLLM and give its file"

#: Architectures that the tests compare with the caches that vLLM makes of each
#: (tests/planning/test_models.py). Where config.json gives a window and does not say which layers
#: have it, each n-th layer has full attention; with 0 none has; with None that is not known.
KNOWN: Mapping[str, int | None] = {
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")),
    **dict.fromkeys(("GptOssForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM")),
    **dict.fromkeys(("Phi3ForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM")),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")),
    **dict.fromkeys(("Glm4ForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM")),
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM", "SmolLM3ForCausalLM")),
    **dict.fromkeys(("Ernie4_5ForCausalLM", "SeedOssForCausalLM", "CohereForCausalLM")),
    "Gemma2ForCausalLM": 2,
    "Gemma3ForCausalLM": 6,
    "MistralForCausalLM": 0,
}


@dataclass(frozen=True)
class Model:
    """The entries of a config.json that say what caches are.

    Attributes:
        kv_heads: of the whole model.
        heads: of queries.
        head_dim: of keys and of values; for latents, the whole width.
        dtype: the checkpoint's own.
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
    """Makes the caches of the first of several ranks.

    Args:
        tokens: of a block.
        dtypes: of the model, and of its cache.
    """
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
    """Finds a model's config.json: the given one, a folder's, or the hub cache's newest.

    Raises:
        BadOptions: there is none.
    """
    folder = given or Path(model)
    if given is not None and given.is_file():
        return given
    if (folder / "config.json").is_file():
        return folder / "config.json"
    cache, home = settings.hub_folders()
    hub = Path(cache) if cache else Path(home or Path.home() / ".cache" / "huggingface") / "hub"
    snapshots = (hub / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json")
    newest = max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
    if given is not None or newest is None:
        raise BadOptions(
            f"there is no config.json of {given or model}, and none in the hub cache ({hub})",
            "give it, or its folder, with --model-config",
        )
    return newest


def read_model(path: Path) -> Model:
    """Reads the config.json of a known model.

    Raises:
        BadOptions: it does not say enough.
        CannotPlan: the model's caches are not known here.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadOptions(
            f"{path} cannot be read: {error}", "give the model's config.json"
        ) from None
    if not isinstance(content, Mapping):
        raise BadOptions(f"{path} holds no configuration", "give the model's config.json")
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else str(names)
    quantization = content.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if name not in KNOWN or scheme or content.get("global_head_dim"):
        what = (
            f"a checkpoint with a KV cache of its own ({scheme})"
            if scheme
            else f"architecture {name}"
        )
        raise CannotPlan(f"{path}: not planned for: {what}", DESCRIBE)
    heads = _number(content, path, "num_attention_heads")
    is_mla = content.get("kv_lora_rank") is not None
    if is_mla:
        parts = ("kv_lora_rank", "qk_rope_head_dim")
        kv_heads, width = heads, sum(_number(content, path, part) for part in parts)
    else:
        kv_heads = _number(content, path, "num_key_value_heads", heads)
        width = content.get("head_dim") or _number(content, path, "hidden_size") // heads
    dtype = content.get("dtype") or content.get("torch_dtype") or "float32"
    return Model(
        kv_heads=kv_heads,
        heads=heads,
        head_dim=int(width),
        dtype=str(dtype).removeprefix("torch."),
        is_mla=is_mla,
        windows=_windows(content, path, KNOWN[name]),
    )


def _number(content: Mapping[str, Any], path: Path, name: str, default: int = 0) -> int:
    found = content.get(name)
    found = default if found is None else found
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise BadOptions(f"{path} does not say {name}", "write it into it")
    return found


def _windows(content: Mapping[str, Any], path: Path, known: int | None) -> tuple[int, ...]:
    """The window of each layer, by the entries that Transformers has for it."""
    layers = _number(content, path, "num_hidden_layers")
    window, kinds = content.get("sliding_window"), content.get("layer_types")
    if kinds and (len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}):
        strange = ", ".join(sorted(map(str, set(kinds))))
        raise CannotPlan(f"{path}: not planned for: {len(kinds)} layers of {strange}", DESCRIBE)
    if not window or content.get("use_sliding_window") is False:
        return (0,) * layers
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    every = content.get("sliding_window_pattern", known)
    if every is None:
        raise CannotPlan(
            f"{path}: not planned for: a window of {window} in layers that it does not name",
            f"write layer_types into it, or {DESCRIBE}",
        )
    return tuple(0 if every and (n + 1) % every == 0 else window for n in range(layers))
