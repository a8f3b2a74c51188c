"""What a patched scheduler sends to workers, in processes that have kvpatch, or not, or off."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpatch.core.errors import PatchRefused
from kvpatch.core.recent_engines import RecentEngines
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.host_buffer.scheduler import StepSaves
from kvpatch.load import read_request
from kvpatch.load.read_request import ReadRequest
from kvpatch.worker.state import scheduler_state
from kvpatch.worker.unpatched_workers import EqualBlockPeers

from .standin import run, write_tree

_NEWEST = FACTS[RELEASES[-1]]
_GUARDED = ReadRequest(5, 5, ((1,),), ((2,),), is_guarded=True)
_OPEN = ReadRequest(5, 5, ((1,),), ((2,),))
_LOADS = "import pickle; found = pickle.loads(bytes.fromhex('{}'))\n"


def _load(sent: object, python_path: Path | None) -> subprocess.CompletedProcess[str]:
    """Unpickled by a process without vLLM, which has not enabled kvpatch."""
    root = Path(__file__).resolve().parents[2]
    code = _LOADS.format(pickle.dumps(sent).hex())
    if python_path is None:  # and none of it can be imported
        code = "import sys; sys.modules['kvpatch'] = None\n" + code
    environment = {name: value for name, value in os.environ.items() if "KVPATCH" not in name}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("sent", [_GUARDED, StepSaves((1,), (2,), 3, is_last=True)])
def test_a_process_without_kvpatch_cannot_take_it(sent: object) -> None:
    off = _load(sent, Path())
    assert off.returncode != 0
    assert "PatchRefused" in off.stderr and "ENABLE_KVPATCH" in off.stderr
    absent = _load(sent, None)
    assert absent.returncode != 0 and "ModuleNotFoundError" in absent.stderr


def test_what_a_stock_worker_may_ignore_reaches_it() -> None:
    assert _load(_OPEN, Path()).returncode == 0


@pytest.mark.parametrize(
    ("is_push", "has_stock_workers", "is_guarded"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_a_load_that_was_judged_before_or_that_p_writes_is_open(
    is_push: bool, has_stock_workers: bool, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In push mode no worker looks at it; and what was equal then may not be any more.

    Nor do such workers count the stages of a pipeline: one without kvpatch does not.
    """
    monkeypatch.setattr(read_request, "is_guarded", lambda *_: True)
    parallel = SimpleNamespace(pipeline_parallel_size=2)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=None)
    scheduler = SimpleNamespace(vllm_config=config)
    if is_push:
        scheduler._push_pending_registrations = {}
    state = scheduler_state(scheduler)
    state.facts, state.has_stock_workers = _NEWEST, has_stock_workers
    request = SimpleNamespace(
        num_prompt_tokens=100, num_computed_tokens=100, kv_transfer_params={}, arrival_time=0.0
    )
    request.prefill_stats = None
    entry = SimpleNamespace(
        local_block_ids=([1, 2],), remote=SimpleNamespace(engine_id="P", block_ids=([3, 4],))
    )
    metadata = SimpleNamespace(reqs_to_recv={"r": entry})

    monkeypatch.setattr(read_request, "loaded_tokens", lambda *_: (100, 100))
    read_request.attach_read_requests(scheduler, {"r": (request,)}, metadata)

    found = read_request.read_request_of(entry)
    assert found is not None and found.is_guarded is is_guarded
    assert found.stages == (2 if is_guarded and _NEWEST.names_regions else 1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path, _NEWEST, _NEWEST.release)


_TAKES = (
    "import importlib, json, kvpatch; kvpatch.enable()\n"
    f"importlib.import_module({_NEWEST.connector.module!r})\n"
    f"{_LOADS.format(pickle.dumps(_GUARDED).hex())}"
    "print(json.dumps([found.tokens, found.is_guarded]))"
)


def test_a_patched_process_takes_all(tree: Path) -> None:
    assert run(tree, _TAKES) == [5, True]


def test_a_process_that_leaves_the_patch_out_does_not(tree: Path) -> None:
    with pytest.raises(AssertionError, match=PatchRefused.__name__):
        run(tree, _TAKES, KVPATCH_DISABLE="unlike_engines")


def test_likeness_is_learnt_from_prompts_of_several_blocks() -> None:
    peers = EqualBlockPeers()
    assert not peers.learn("P", 1, 1)  # tells nothing
    assert peers.learn("P", 3, 3)
    assert peers.learn("P", 1, 1)
    assert not peers.learn("Q", 1, 1)
    assert not peers.learn("P", 6, 3)  # restarted with other blocks under its name
    assert not peers.learn("P", 1, 1)


def test_peers_are_forgotten_in_the_end() -> None:
    peers = EqualBlockPeers()
    assert peers.learn("first", 2, 2)
    for number in range(RecentEngines.most):
        peers.learn(str(number), 2, 2)
    assert not peers.learn("first", 1, 1)


# --- Ray ---------------------------------------------------------------------

_RAY_ENV = """
RAY_NON_CARRY_OVER_ENV_VARS = {"KVPATCH_LOG_LEVEL"}
def get_env_vars_to_copy(exclude_vars=None, additional_vars=None, destination=None):
    return {"VLLM_X"} | (additional_vars or set())
"""
_EXECUTOR = "from vllm.ray.ray_env import get_env_vars_to_copy\n"
_NAMES = """
import importlib, json, kvpatch
{before}
kvpatch.enable()
found = [sorted(importlib.import_module(m).get_env_vars_to_copy(additional_vars={{"A"}}))
         for m in ("vllm.ray.ray_env", "vllm.executor")]
kvpatch.disable()
found.append(sorted(importlib.import_module("vllm.executor").get_env_vars_to_copy()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("before", ["", "import vllm.executor"])
def test_rays_workers_are_given_our_variables(tree: Path, before: str) -> None:
    (tree / "vllm" / "ray").mkdir()
    (tree / "vllm" / "ray" / "__init__.py").touch()
    (tree / "vllm" / "ray" / "ray_env.py").write_text(_RAY_ENV)
    (tree / "vllm" / "executor.py").write_text(_EXECUTOR)

    found = run(
        tree,
        _NAMES.format(before=before),
        ENABLE_KVPATCH="true",
        KVPATCH_TRANSFER="staged",
        KVPATCH_LOG_LEVEL="INFO",  # which this user leaves behind
    )

    expected = ["A", "ENABLE_KVPATCH", "KVPATCH_TRANSFER", "VLLM_X"]
    assert found == [expected, expected, ["VLLM_X"]], json.dumps(found)
