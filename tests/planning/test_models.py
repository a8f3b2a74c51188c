"""A plan reads of a config.json the caches that vLLM itself makes of that model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpatch.core.errors import BadOptions
from kvpatch.tools.planning.arguments import known
from kvpatch.tools.planning.models_and_backends import Model, read_model

from .described import described

KNOWN = sorted(known("architectures"))
pytestmark = pytest.mark.patching

_MODELS = Path(__file__).with_name("models.json")
_CONFIGS: dict[str, dict[str, Any]] = json.loads(_MODELS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """By architecture, the caches of its layers, as ``describe`` has them of the installed vLLM."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("models")
    for name, content in _CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
    found = described([{"command": ["vllm", "serve", str(folder / name)]} for name in _CONFIGS])
    return {name: _made(one) for name, one in zip(_CONFIGS, found, strict=True)}


def _made(description: dict[str, Any]) -> list[list[Any]]:
    layers = description["caches"]["layers"]
    return [[one[name] for name in ("kind", "kv_heads", "head_dim", "window")] for one in layers]


def _read(folder: Path, content: dict[str, Any]) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return read_model(path)


def _planned(model: Model) -> list[list[Any]]:
    heads = 1 if model.is_mla else model.kv_heads
    return [
        [model.kind(number), heads, model.head_dim, window]
        for number, window in enumerate(model.windows)
    ]


def test_each_known_architecture_is_played() -> None:
    assert set(KNOWN) == _CONFIGS.keys() - {"GraniteMoeHybridForCausalLM"}


@pytest.mark.parametrize("architecture", KNOWN)
def test_a_plan_reads_what_vllm_makes(
    architecture: str, made: dict[str, list[list[Any]]], tmp_path: Path
) -> None:
    assert _planned(_read(tmp_path, _CONFIGS[architecture])) == made[architecture]


@pytest.mark.parametrize("entry", ["num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_negative_control_another_entry_is_noticed(
    entry: str, made: dict[str, list[list[Any]]], tmp_path: Path
) -> None:
    spoilt = {**_CONFIGS["Qwen3ForCausalLM"], entry: 4}

    assert _planned(_read(tmp_path, spoilt)) != made["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Llama4ForCausalLM"]}, "Llama4ForCausalLM"),
        ({"architectures": ["FalconMambaForCausalLM"]}, "FalconMambaForCausalLM"),
        (
            {"architectures": ["DeepseekV32ForCausalLM"], "kv_lora_rank": 512},
            "DeepseekV32ForCausalLM",
        ),
        ({"architectures": None}, "architecture None"),
        ({"sliding_window": 512}, "layers that it does not name"),
        ({"layer_types": ["full_attention"] * 5 + ["gated"]}, "gated"),
        ({"layer_types": ["linear_attention"] * 6}, "6 layers of linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 layers of full_attention"),
        ({"global_head_dim": 512}, "architecture LlamaForCausalLM"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "a KV cache of its own"),
        ({"num_hidden_layers": None}, "does not say num_hidden_layers"),
        ({"num_attention_heads": None}, "does not say num_attention_heads"),
    ],
)
def test_others_are_no_guess(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    content = {**_CONFIGS["LlamaForCausalLM"], **changes}
    with pytest.raises(BadOptions, match=says):
        _read(tmp_path, {name: value for name, value in content.items() if value is not None})
