"""Pairs of public configurations, each with the exit statuses of a plan that are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from .walk import TRANSFER, plan

pytestmark = pytest.mark.patching


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text("utf-8"))
    return found


def _merged(*parts: Any) -> Any:
    """Mappings within one another; the last word counts."""
    if not all(isinstance(one, dict) for one in parts):
        return parts[-1]
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: _merged(*(one[name] for one in parts if name in one)) for name in names}


def _side(pair: dict[str, Any], side: str) -> dict[str, Any]:
    """A side of public.yaml: what it has by default, with P and D on two machines."""
    hosts = {"p": "10.0.0.1", "d": "10.0.0.2"}
    about = {"release": "0.32.0", "machine": side, "env": {_HOST: hosts[side]}}
    default = {"kv-transfer-config": TRANSFER, "kvpatch": about}
    asked = _merged(pair["both"], pair.get(side, {}))
    if "kv-transfer-config" in asked:
        default.pop("kv-transfer-config")
    return _merged(default, asked)


_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_CASES, _PUBLIC = _read("cases.yaml"), _read("public.yaml")
_MODELS: dict[str, Any] = _CASES["models"] | _PUBLIC["models"]
_PAIRS: dict[str, dict[str, Any]] = _CASES["pairs"] | {
    name: pair | {side: _side(pair, side) for side in "pd"}
    for name, pair in _PUBLIC["pairs"].items()
}
#: Cures that helped nobody in these pairs.
_NO_CURES = {
    "c6_srt_dsv4": "use one --block-size",
    "gen": "set KVPATCH_GENERATION",
    "push_both": "use NixlConnector",
    "y5_buffer_cuda_on_cpu": "645120",
}


def _write(name: str, folder: Path) -> list[str]:
    """Both sides' files, and their models' beside them."""
    files = []
    for side in "pd":
        content = json.loads(json.dumps(_PAIRS[name][side]))
        config = folder / f"{side}.json"
        config.write_text(json.dumps(_MODELS[content["kvpatch"]["model-config"]]))
        content["kvpatch"]["model-config"] = config.name
        path = folder / f"{side}.yaml"
        path.write_text(yaml.safe_dump(content))
        files.append(str(path))
    return files


@pytest.mark.parametrize("name", _PAIRS)
def test_a_pair_gets_its_verdict(name: str, tmp_path: Path) -> None:
    right = _PAIRS[name]

    status, output = plan(*_write(name, tmp_path))

    assert status in right["status"], output
    assert re.search(right.get("says", ""), output), output
    assert _NO_CURES.get(name, "\0") not in output
    if status == 2:
        assert "not planned for" in output


def test_negative_control_a_verdict_of_another_pair_is_noticed(tmp_path: Path) -> None:
    status, output = plan(*_write("pull_named", tmp_path), "--json")

    assert status == 0 and json.loads(output)["serves"]
    assert 0 not in _PAIRS["push_vs_pull"]["status"]
