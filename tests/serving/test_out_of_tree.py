"""A platform from elsewhere, whose device vLLM's connector has never heard of, serves P and D.

That stock refuses such a device the lab shows (test_host_buffer.py).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.serving,
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
    ),
]

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900


@pytest.fixture
def strange_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the platform, with its entry point, where every vLLM process looks."""
    package = str(Path(__file__).parent / "out_of_tree")
    paths = [package, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.usefixtures("strange_platform")
def test_a_strange_platform_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself (auto): nothing but the platform asks for a host buffer."""
    monkeypatch.setenv("KVPATCH_HOST_BUFFER_BYTES", str(32 * 1024**2))

    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvpatch.tools.cli", "verify", "--work-dir", str(tmp_path)),
            *("--setups", "single,kvpatch", "--p-args", "--block-size 64"),
        ],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        cwd=_ROOT,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 23 identical to single" in done.stdout
    assert "negative control: differs (as it must), 3 of 3" in done.stdout
    for side in ("prefill", "decode"):
        log = (tmp_path / f"kvpatch-{side}.log").read_text()
        assert "kv_buffer_device: strange" in log
        assert "host buffer of 33554432 bytes" in log
