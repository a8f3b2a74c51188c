"""Two config files of a new user's, and what may be written into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def write_side(folder: Path, role: str, **changes: Any) -> Path:
    """A side's file: options of vLLM's, and the section `kvpatch` by its own names.

    Args:
        changes: options; of the section `about`, and variables as `env`; None leaves one out.
    """
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    number = {"p": 1, "d": 2}[role]
    about: dict[str, Any] = {
        "release": "0.32.0",
        "platform": "cuda",
        "attention-backend": "FLASH_ATTN",
        "machine": f"node-{role}",
        "env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": f"10.0.0.{number}", **changes.pop("env", {})},
        **changes.pop("about", {}),
    }
    options: dict[str, Any] = {
        "model": str(model),
        "block-size": {"p": 128, "d": 32}[role],
        "kv-transfer-config": json.dumps(TRANSFER),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    about["env"] = {name: value for name, value in about["env"].items() if value is not None}
    content = {**options, "kvpatch": {k: v for k, v in about.items() if v is not None}}
    path = folder / f"{role}.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return path
