"""What a plan reads of a config.json, against the caches that vLLM itself makes of that model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpatch.core.errors import CannotPlan
from kvpatch.tools.planning.model import KNOWN, Model, read_model

pytestmark = pytest.mark.patching

_MODELS = Path(__file__).with_name("models.json")
_CONFIGS: dict[str, dict[str, Any]] = json.loads(_MODELS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """By architecture, the caches of its layers, of the installed vLLM."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "tests.planning.vllm_caches", str(_MODELS), str(folder)]
    root = Path(__file__).parents[2]
    found = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    caches: dict[str, list[list[Any]]] = json.loads(found.stdout.splitlines()[-1])
    return caches


def _read(folder: Path, content: dict[str, Any]) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return read_model("m", path)


def _planned(model: Model) -> list[list[Any]]:
    """As ``vllm_caches`` says it."""
    windows = iter(model.windows)
    found: list[list[Any]] = []
    for number in range(model.layers):
        if number in model.state_layers:
            sizes = model.states
            assert sizes is not None
            channels = sizes.intermediate + 2 * sizes.groups * sizes.state_size
            convolution = [channels, sizes.kernel - 1]
            states = [sizes.heads, sizes.head_dim, sizes.state_size]
            found.append(["MambaSpec", [convolution, states]])
            continue
        window = next(windows)
        if model.is_mla:
            found.append(["MLAAttentionSpec", 1, model.head_dim, None])
        else:
            kind = "SlidingWindowSpec" if window else "FullAttentionSpec"
            found.append([kind, model.kv_heads, model.head_dim, window or None])
    return found


def test_each_known_architecture_is_played() -> None:
    assert set(KNOWN) == _CONFIGS.keys()


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
        ({"architectures": None}, "architectures None"),
        ({"sliding_window": 512}, "which layers"),
        ({"layer_types": ["full_attention"] * 5 + ["gated"]}, "gated"),
    ],
)
def test_others_are_no_guess(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CannotPlan, match=says):
        _read(tmp_path, {**_CONFIGS["LlamaForCausalLM"], **changes})


def test_layers_of_a_nested_configuration_are_pointed_out(tmp_path: Path) -> None:
    content = {"architectures": ["SomeVLM"], "llm_config": _CONFIGS["LlamaForCausalLM"]}

    with pytest.raises(CannotPlan, match="write the entries of llm_config"):
        _read(tmp_path, content)
