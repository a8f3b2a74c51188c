"""vLLM's own Ray actors on two raylets get kvpatch's variables, or cannot take its requests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.lab.releases import is_full

from .commands import ENGINES, ROOT, succeed

pytestmark = [
    *ENGINES,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here"),
]


def test_actors_have_kvpatch_or_say_that_they_lack_it() -> None:
    variables = {"ENABLE_KVPATCH": "true", "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"}
    said = succeed(
        *(sys.executable, str(Path(__file__).parent / "ray_actors.py")),
        seconds=600,
        variables=os.environ | variables,
    )

    copied, left_behind = json.loads(said.splitlines()[-1])

    assert copied == {"nodes": 2, "enabled": [True, True], "taken": [5, 5]}
    assert left_behind["enabled"] == [False, False]
    assert "unlike_engines is not in this worker" in left_behind["refused"]
    assert "ENABLE_KVPATCH" in left_behind["refused"]


@pytest.mark.skipif(
    not is_full(), reason="three engines, two of them of two ranks, at once: tests/run.sh --full"
)
def test_engines_whose_ranks_are_actors(tmp_path: Path) -> None:
    """With kvpatch in the actors all is identical; without it D computes, and says why."""
    said = succeed(
        *(sys.executable, str(ROOT / "experiments" / "ray_cluster.py")),
        *("--work-dir", str(tmp_path)),
        seconds=1200,
        variables=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert "all 23 identical to alone" in said
    assert "negative control: differs (as it must), 3 of 3" in said
    assert "identical: as it must be" in said
    assert "computed: as it must be" in said
    copied = (tmp_path / "copied.log").read_text()
    assert len(set(re.findall(r"RayWorkerProc pid=(\d+)", copied))) == 2
