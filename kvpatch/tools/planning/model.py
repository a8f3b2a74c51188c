"""A model's cache, from its config.json: layers, KV heads, width, windows, recurrent states."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import SEND_ONE, BadOptions, CannotPlan
from kvpatch.geometry.state_shares import Part, SharedState
from kvpatch.worker.state_division import StateDivision

#: Architectures whose caches are what this module reads from their config.json. It is held against
#: the caches that vLLM itself makes of each (tests/planning/test_models.py).
KNOWN = (
    "ChatGLMModel",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)
#: Where layers have windows by their place: every so many layers one has none.
_PATTERNS = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}
#: All of whose layers have windows, where nothing else is said.
_ALL_WINDOWS = ("MistralForCausalLM", "Starcoder2ForCausalLM")
#: Entries of ``layer_types`` that are recurrent state.
_STATE_TYPES = ("mamba", "mamba2")
_ATTENTION_TYPES = ("attention", "full_attention", "sliding_attention")


#: Of one number, by what vLLM calls types that are not cut to a byte.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True)
class StateSizes:
    """Mamba2's, of all ranks together.

    Attributes:
        intermediate: channels of the convolution that are the state space's heads'.
        groups: that share heads out; each has a row of `state_size` in B, and in C.
    """

    intermediate: int
    groups: int
    heads: int
    head_dim: int
    state_size: int
    kernel: int

    def division(self, dtypes: tuple[str, str], drafted_tokens: int) -> StateDivision:
        """The convolution and the state space behind it, of all ranks together.

        Args:
            dtypes: of the two.
            drafted_tokens: a convolution keeps as many more positions.
        """
        conv_bytes, item_bytes = (ITEM_BYTES[dtype] for dtype in dtypes)
        positions = self.kernel - 1 + drafted_tokens
        of_groups = Part(self.groups * self.state_size, is_copied=self.groups == 1)
        convolution = (Part(self.intermediate), of_groups, of_groups)
        unit_bytes = self.head_dim * self.state_size * item_bytes
        return StateDivision(
            (
                SharedState(positions * conv_bytes, convolution),
                SharedState(unit_bytes, (Part(self.heads),)),
            ),
            reason="",
        )


@dataclass(frozen=True)
class Model:
    """What a model's cache is made of.

    Attributes:
        name: as the engine is told it, which engines compare.
        layers: of all kinds.
        kv_heads: of the whole model.
        heads: that ask, of the whole model.
        head_dim: of keys, and of values; of MLA's latent its whole width.
        dtype: the checkpoint's own.
        windows: the sliding window in tokens of each attention layer; 0 for full attention.
        state_layers: the numbers of layers with recurrent state.
        states: their sizes; None where there are none.
        cache_dtype: what the checkpoint says of its KV cache; empty for nothing.
    """

    name: str
    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    dtype: str
    is_mla: bool = False
    windows: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    states: StateSizes | None = None
    cache_dtype: str = ""

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(n for n in range(self.layers) if n not in self.state_layers)

    @property
    def has_groups(self) -> bool:
        """Whether layers have several block tables, or one with a window."""
        return bool(self.state_layers) or any(self.windows)

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block table, as vLLM's allocator makes them of layers by kinds."""
        if not self.has_groups:
            return (tuple(range(self.layers)),)
        kinds: dict[object, list[int]] = {}
        windows = dict(zip(self.attention_layers, self.windows, strict=True))
        for number in range(self.layers):
            kinds.setdefault(windows.get(number, "state"), []).append(number)
        sizes = [len(of_kind) for of_kind in kinds.values()]
        size = max(sizes) if max(sizes) < 1.25 * min(sizes) else min(sizes)
        return tuple(
            tuple(of_kind[first : first + size])
            for of_kind in kinds.values()
            for first in range(0, len(of_kind), size)
        )


def find_config(model: str, given: Path | None) -> Path:
    """A model's config.json: the one that is given, a folder's, or the hub cache's newest.

    Raises:
        BadOptions: there is none.
    """
    if given is not None:
        path = given / "config.json" if given.is_dir() else given
        if not path.is_file():
            raise BadOptions(
                f"there is no model configuration at {path}", "give its config.json, or its folder"
            )
        return path
    if (Path(model) / "config.json").is_file():
        return Path(model) / "config.json"
    snapshots = _hub() / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if found:
        return found[-1]
    raise BadOptions(
        f"{model} is neither a folder with a config.json nor in the hub cache ({_hub()})",
        "give its config.json with --model-config",
    )


def read_model(name: str, path: Path) -> Model:
    """What a config.json says of a model's cache.

    Raises:
        BadOptions: it does not say enough.
        CannotPlan: its caches are not known here.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadOptions(
            f"{path} cannot be read: {error}", "give the model's config.json"
        ) from None
    if not isinstance(content, Mapping):
        raise BadOptions(f"{path} holds no configuration", "give the model's config.json")
    text = content.get("text_config")
    of_text = {**content, **text} if isinstance(text, Mapping) else content
    return _Reading(name, str(path), of_text).model()


@dataclass(frozen=True)
class _Reading:
    name: str
    path: str
    content: Mapping[str, Any]

    def model(self) -> Model:
        self._refuse_unknown()
        layers = self.number("num_hidden_layers", "n_layer", "num_layers")
        is_mla = self.content.get("kv_lora_rank") is not None
        state_layers = self._state_layers(layers)
        asking = self.number("num_attention_heads", "n_head")
        if is_mla:
            heads, width = asking, self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
        else:
            heads, width = self._heads(asking)
        return Model(
            name=self.name,
            layers=layers,
            kv_heads=heads,
            heads=asking,
            head_dim=width,
            dtype=self._dtype(),
            is_mla=is_mla,
            windows=self._windows(layers, state_layers),
            state_layers=state_layers,
            states=self._states() if state_layers else None,
            cache_dtype=self._cache_dtype(),
        )

    @property
    def architecture(self) -> str:
        """As vLLM finds the model's class by it; empty where nothing says it."""
        names = self.content.get("architectures")
        return str(names[0]) if isinstance(names, list) and len(names) == 1 else ""

    def _refuse_unknown(self) -> None:
        """Raises CannotPlan for a model whose caches nobody has held against vLLM's."""
        if self.architecture in KNOWN:
            return
        said = self.architecture or f"architectures {self.content.get('architectures')!r:.80}"
        nested = [
            name
            for name, one in self.content.items()
            if name.endswith("_config")
            and (isinstance(one, Mapping) and "num_hidden_layers" in one)
        ]
        reason = f"{self.path}: not planned for: {said}; known are {', '.join(KNOWN)}"
        if nested:
            raise CannotPlan(
                reason,
                f"write the entries of {nested[0]} with their own `architectures` into a file, and "
                "name it as model-config, where all layers with a cache are those",
            )
        raise CannotPlan(reason, "run kvpatch describe -- vllm serve MODEL where vLLM is installed")

    def number(self, *names: str) -> int:
        """The first of some entries that is there."""
        for name in names:
            found = self.content.get(name)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
        raise BadOptions(f"{self.path} does not say {' or '.join(names)}", "write it into it")

    def _heads(self, asking: int) -> tuple[int, int]:
        """KV heads, and the width of one; whose names vLLM reads by kinds of models, too."""
        heads = asking
        if self.content.get("num_key_value_heads") is not None:
            heads = self.number("num_key_value_heads")
        elif self.content.get("multi_query_attention"):
            heads = self.number("multi_query_group_num")
        elif self.content.get("new_decoder_architecture"):
            heads = self.number("num_kv_heads")
        elif self.content.get("multi_query"):
            heads = 1
        if self.content.get("global_head_dim") or self.content.get("v_head_dim"):
            raise CannotPlan(
                f"{self.path}: layers of several shapes are not planned for "
                "(docs/reference/limits.md says what is read of them)",
                SEND_ONE,
            )
        for name in ("head_dim", "kv_channels"):
            if self.content.get(name) is not None:
                return heads, self.number(name)
        return heads, self.number("hidden_size", "n_embd") // asking

    def _dtype(self) -> str:
        found = self.content.get("dtype") or self.content.get("torch_dtype") or "float32"
        return str(found).removeprefix("torch.")

    def _types(self) -> list[str]:
        found = self.content.get("layer_types") or self.content.get("layers_block_type") or []
        types = [str(kind) for kind in found]
        if "mamba_n_heads" in self.content and "linear_num_key_heads" not in self.content:
            # As newer versions of transformers write it: Mamba2, and no gated delta net.
            return ["mamba" if kind == "linear_attention" else kind for kind in types]
        return types

    def _state_layers(self, layers: int) -> tuple[int, ...]:
        types = self._types()
        strange = sorted(set(types) - set(_STATE_TYPES) - set(_ATTENTION_TYPES))
        if strange or (types and len(types) != layers):
            raise CannotPlan(
                f"{self.path}: layers by layer_types are not planned for but attention, sliding "
                f"windows and Mamba2, one for each of {layers} layers: it has {len(types)}, and "
                f"{', '.join(strange) or 'no others'} among them",
                SEND_ONE,
            )
        return tuple(n for n, kind in enumerate(types) if kind in _STATE_TYPES)

    def _windows(self, layers: int, state_layers: tuple[int, ...]) -> tuple[int, ...]:
        window = self.content.get("sliding_window")
        size = window if isinstance(window, int) and window > 0 else 0
        if self.content.get("use_sliding_window") is False:
            size = 0
        types = self._types()
        pattern = self.content.get("sliding_window_pattern") or _PATTERNS.get(self.architecture)
        is_said = types or pattern or self.architecture in _ALL_WINDOWS
        if size and not is_said:
            raise CannotPlan(
                f"{self.path}: which layers of {self.architecture} have the window of {size} is "
                "not known here",
                "write layer_types into it, or use_sliding_window: false where none has it",
            )
        return tuple(
            size if _has_window(number, types, pattern) else 0
            for number in range(layers)
            if number not in state_layers
        )

    def _states(self) -> StateSizes:
        heads, width = self.number("mamba_n_heads"), self.number("mamba_d_head")
        size = self.number("mamba_d_state")
        return StateSizes(
            intermediate=heads * width,
            groups=self.number("mamba_n_groups"),
            heads=heads,
            head_dim=width,
            state_size=size,
            kernel=self.number("mamba_d_conv"),
        )

    def _cache_dtype(self) -> str:
        quantization = self.content.get("quantization_config") or {}
        scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
        return "" if not scheme else str(scheme)


def _has_window(number: int, types: Sequence[str], pattern: object) -> bool:
    """Whether a layer of a model with windows has one: all have, where nothing else is said."""
    if types:
        return types[number] == "sliding_attention"
    return not isinstance(pattern, int) or pattern < 1 or (number + 1) % pattern != 0


def _hub() -> Path:
    cache, home = settings.hub_folders()
    folder = Path(home) if home else Path.home() / ".cache" / "huggingface"
    return Path(cache) if cache else folder / "hub"
