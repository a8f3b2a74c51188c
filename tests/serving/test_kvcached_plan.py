"""What experiments/kvcached_equivalence.sh would run, and how it refuses; no GPU here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from experiments.engines.kvcached_pairs import ROWS, complain_of, layout_found
from experiments.engines.lab_probe import describe
from experiments.engines.pairs import Side
from kvpatch.core.errors import EngineFailed

from .commands import ROOT, run

pytestmark = pytest.mark.serving


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "experiments" / "kvcached_equivalence.sh")
    return run(
        script, *arguments, variables=os.environ | {"KVPATCH_PYTHON": sys.executable} | variables
    )


# --- what caches must look like ------------------------------------------------------


class _Layer:
    """FAKE of a layer that the probe has found: its tensor is real, on the host."""

    group = 0
    window_tokens = None
    block_tokens = 4

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        from kvpatch.geometry.dimension_order import DimensionOrder
        from kvpatch.geometry.planes_of_tensors import read_planes
        from kvpatch.worker.registered_caches import tensor_facts

        order = DimensionOrder(("block", "kv", "token", "head", "channel"))
        self.name, self.tensor = name, tensor
        self.planes = read_planes(name, tensor_facts(tensor), order)


def _dump(*tensors: torch.Tensor) -> list[list[dict[str, Any]]]:
    return [[describe(_Layer(f"layers.{n}", t)) for n, t in enumerate(tensors)]]  # type: ignore[arg-type]


def _rows() -> list[list[dict[str, Any]]]:
    return _dump(*torch.zeros(6, 3, 2, 4, 2, 8).unbind(1))


def _apart() -> list[list[dict[str, Any]]]:
    return _dump(*(torch.zeros(2, 6, 4, 2, 8).transpose(0, 1) for _ in range(3)))


def test_a_dump_shows_which_layout_it_is() -> None:
    assert layout_found(_rows()) == "contiguous"
    assert layout_found(_apart()) == "split-half"
    # One buffer with the layers one behind the other, as vLLM has it from 0.29 on.
    assert layout_found(_dump(*torch.zeros(3, 6, 2, 4, 2, 8).unbind(0))) is None
    assert layout_found([*_rows(), *_apart()]) is None
    # Layers of two groups have one place in a row.
    pool = torch.zeros(6, 2, 2, 4, 2, 8).unbind(1)
    halves = [torch.zeros(2, 6, 4, 2, 8).transpose(0, 1) for _ in range(2)]
    assert layout_found(_dump(*pool, *pool)) == "contiguous"
    assert layout_found(_dump(*halves, *halves)) == "split-half"


@pytest.mark.parametrize(
    ("side", "ranks", "log", "clause"),
    [
        (Side(32, kvcached="contiguous"), _rows(), "no word", "to be on, and its log has no line"),
        (Side(32), _rows(), "[kvcached] hello", "expected kvcached to be off"),
        (Side(32, kvcached="contiguous"), _apart(), "[kvcached] hello", "found split-half"),
        (Side(32, kvcached="split-half"), _rows(), "[kvcached] hello", "found contiguous"),
        (Side(32, kvcached="contiguous"), _rows(), "[kvcached] hello", None),
        (Side(32), _apart(), "no word", None),
    ],
)
def test_an_engine_that_is_not_as_asked_is_refused(
    side: Side, ranks: list[list[dict[str, Any]]], log: str, clause: str | None
) -> None:
    refused = pytest.raises(EngineFailed, match=f"one: .*{clause}") if clause else nullcontext()
    with refused:
        complain_of("one", side, ranks, log)


# --- the script ----------------------------------------------------------------------


def test_help_and_list_need_no_gpu() -> None:
    helped, listed = (_run(option) for option in ("--help", "--list"))

    assert (helped.returncode, listed.returncode) == (0, 0)
    assert "--rows" in helped.stdout and "Exit status" in helped.stdout
    assert listed.stdout.split() == [row.name for row in ROWS]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have CUDA")
@pytest.mark.parametrize("python", [sys.executable, ""])
def test_without_cuda_it_refuses_and_installs_nothing(python: str) -> None:
    refused = _run("--rows", "contiguous", KVPATCH_PYTHON=python)

    assert refused.returncode == 2
    assert "no CUDA device (nvidia-smi finds none)" in refused.stderr
    assert "--on-cpu runs" in refused.stderr
