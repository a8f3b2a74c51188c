"""Two config files of a new user's, what may be written into them, and what a plan says then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from kvpatch.tools.cli import app
from kvpatch.tools.planning.arguments import read_arguments
from kvpatch.tools.planning.engine import PlannedEngine, engine_of

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def transfer(**changes: Any) -> dict[str, str]:
    """An engine's ``--kv-transfer-config`` with these entries."""
    return {"kv_transfer_config": json.dumps({**TRANSFER, **changes})}


def extra(**entries: Any) -> dict[str, str]:
    """The same with these entries of its ``kv_connector_extra_config``."""
    return transfer(kv_connector_extra_config=entries)


def plan(*arguments: object) -> tuple[int, str]:
    """Exit status and output of ``kvpatch plan``."""
    found = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "400"})
    assert isinstance(found.exception, SystemExit | None), found.exception
    return found.exit_code, found.output


def planned_engine(folder: Path, role: str, **changes: Any) -> PlannedEngine:
    """The engine that a side's file describes."""
    path = write_side(folder, role, **changes)
    return engine_of(role.upper(), read_arguments(str(path)))  # type: ignore[arg-type]


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
