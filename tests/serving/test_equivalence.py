"""The main job on real engines: tokens and cache bytes as a single engine's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
    ),
]

_TIMEOUT_S = 900


def _verify(work_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpatch.tools.cli",
            "verify",
            "--work-dir",
            str(work_dir),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        cwd=Path(__file__).resolve().parents[2],
    )


@pytest.mark.engines
def test_a_pair_answers_like_a_single_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process is started as a user's: none is a fork (``engine_ancestor.py``)."""
    monkeypatch.delenv("TEST_ENGINE_ANCESTOR", raising=False)
    done = _verify(tmp_path, "--setups", "single,kvpatch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 23 identical to single" in done.stdout
    assert "negative control: differs (as it must), 3 of 3" in done.stdout

    records = [
        json.loads(line) for line in (tmp_path / "equivalence.jsonl").read_text().splitlines()
    ]
    assert len(records) == 26
    for record in records:
        single = record["setups"]["single"]
        observed = record["setups"]["kvpatch"]
        same_tokens = observed["completion"]["token_ids"] == single["completion"]["token_ids"]
        same_cache = observed["prefill"]["fingerprints"] == observed["decode"]["fingerprints"]
        assert same_tokens is same_cache is not record["control"]
        assert len(observed["decode"]["fingerprints"]) == 4
        assert observed["decode"]["computed_tokens"] == record["prompt_tokens"] - 1
    fingerprints = [
        json.dumps(record["setups"]["single"]["prefill"]["fingerprints"]) for record in records
    ]
    assert len(set(fingerprints)) == len(records), "other prompts must have other fingerprints"


def test_a_release_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    done = _verify(tmp_path, "--release", "0.1.0")
    assert done.returncode == 2
    assert "expected vLLM 0.1.0, found" in done.stderr
