"""vLLM's own Ray actors on two raylets get kvpatch's variables, or cannot take its requests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.releases import is_full

pytestmark = [
    pytest.mark.serving,
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
    ),
]

_SCRIPT = Path(__file__).parent / "ray_actors.py"


def test_actors_have_kvpatch_or_say_that_they_lack_it() -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, str(_SCRIPT)],
        env=os.environ | {"ENABLE_KVPATCH": "true", "PYTHONPATH": root, "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    copied, left_behind = json.loads(done.stdout.splitlines()[-1])

    assert copied == {"nodes": 2, "enabled": [True, True], "taken": [5, 5]}
    assert left_behind["enabled"] == [False, False]
    assert "unlike_engines is not in this worker" in left_behind["refused"]
    assert "ENABLE_KVPATCH" in left_behind["refused"]


@pytest.mark.skipif(
    not is_full(), reason="three engines, two of them of two ranks, at once: tests/run.sh --full"
)
def test_engines_whose_ranks_are_actors(tmp_path: Path) -> None:
    """With kvpatch in the actors all is identical; without it D computes, and says why."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "experiments" / "ray_cluster.py"), "--work-dir", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    assert "all 23 identical to alone" in done.stdout
    assert "negative control: differs (as it must), 3 of 3" in done.stdout
    assert "identical: as it must be" in done.stdout
    assert "computed: as it must be" in done.stdout
    copied = (tmp_path / "copied.log").read_text()
    assert len(set(re.findall(r"RayWorkerProc pid=(\d+)", copied))) == 2
