"""A share of vLLM's own NIXL tests with kvpatch on: those files that take seconds, and pass whole.

``experiments/upstream_tests.sh`` runs all of them, without kvpatch too, and compares.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

pytestmark = pytest.mark.upstream

_ROOT = Path(__file__).resolve().parents[2]
_RELEASE = "0.32.0"
#: Of that release, by file.
_TESTS = {
    "test_nixl_desc_geometry.py": 220,
    "test_nixl_push_connector.py": 92,
    "test_tp_mapping.py": 26,
    "test_remote_decode_lifecycle.py": 4,
    "test_remote_prefill_lifecycle.py": 16,
}
_ONE = "test_nixl_desc_geometry.py::test_hetero_ppl_with_block_size_ratio[5]"


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "upstream_tests", _ROOT / "experiments" / "upstream_tests.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(upstream: ModuleType) -> Path:
    upstream.check_environment(_RELEASE)
    folder = _ROOT / ".cache" / f"upstream-{_RELEASE}"
    upstream.write_models(folder / "hub-home" / "hub")
    found = upstream.fetch_tests(_RELEASE, folder, Console(stderr=True))
    assert isinstance(found, Path)
    return found


def _run(source: Path, folder: Path, tests: list[str], *options: str) -> Any:
    """What the experiment's plugin wrote down of these tests."""
    written = folder / "results.json"
    unit = Path("tests", "v1", "kv_connector", "unit")  # of `source`, as tests are named by it
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "--rootdir", "."]
    # The conftest of all of vLLM's tests, which these do without, imports more than vLLM needs.
    command += ["--confcutdir", str(unit), "-p", "no:cacheprovider"]
    command += ["-p", "upstream_tests_plugin", "--kvpatch-results", str(written), *options]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPATCH_", "VLLM_", "HF_", "PYTEST_"))
    } | {
        "ENABLE_KVPATCH": "true",
        "HF_HOME": str(source.parent / "hub-home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_ROOT / 'experiments'}:{_ROOT}",
    }
    subprocess.run(
        [*command, *(str(unit / test) for test in tests)],
        cwd=source,
        env=environment,
        capture_output=True,
        timeout=600,
        check=False,
    )
    return json.loads(written.read_text())


def test_what_passes_on_stock_passes_with_kvpatch(source: Path, tmp_path: Path) -> None:
    record = _run(source, tmp_path, list(_TESTS))

    applied = [p["slug"] for p in record["kvpatch"]["patches"] if p["outcome"] == "applied"]
    assert "unlike_engines" in applied
    assert set(record["results"].values()) == {"passed"}, record["reasons"]
    by_file = {file: sum(file in test for test in record["results"]) for file in _TESTS}
    assert by_file == _TESTS


def test_a_broken_kvpatch_is_noticed(source: Path, tmp_path: Path) -> None:
    record = _run(source, tmp_path, [_ONE], "--break-kvpatch")

    (result,) = record["results"].values()
    assert "failed" in result and "BrokenOnPurpose" in result
