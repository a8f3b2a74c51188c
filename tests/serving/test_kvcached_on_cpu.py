"""kvcached's layouts in real engines, growing and shrinking while they serve.

Without a GPU: kvcached's own view code in vLLM's engines; its compiled part and its manager are
stood in for (``elastic/kvcached_on_cpu.py``). A page that is not there can be neither read nor
written: an engine that touches one ends, and its row fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .judged import require_identical

pytestmark = [
    pytest.mark.serving,
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
    ),
]

_SCRIPT = Path(__file__).resolve().parents[2] / "experiments/kvcached_equivalence.sh"
_TIMEOUT_S = 900
_PAGES = re.compile(r"stand-in: (\d+) pages are there, (\d+) came and (\d+) went")


def test_both_layouts_grow_and_shrink_while_they_serve(tmp_path: Path) -> None:
    row = "split-half-contiguous-32-128"

    done = subprocess.run(
        [str(_SCRIPT), "--on-cpu", "--rows", row, "--work-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, "KVPATCH_PYTHON": sys.executable},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "kvcached.jsonl").read_text().splitlines()]
    require_identical(records, layers=4)
    for engine in ("prefill-0", "decode-kvpatch"):
        found = _PAGES.findall((tmp_path / f"{row}-{engine}.log").read_text())
        there = [int(pages) for pages, _, _ in found]
        _, came, went = map(int, found[-1])
        assert max(there) < came and min(there) < max(there), engine
        assert went > 0, engine
