"""``kvpatch verify --device``: two workers' caches, on a GPU too where there is one."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from kvpatch.tools.cli import app
from kvpatch.tools.verify import workers
from kvpatch.transfer import caches
from tests.on_gpu import GPU

pytestmark = pytest.mark.lab

SOME = (workers.PAIRS[1], workers.PAIRS[4])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_all_bytes_are_where_they_belong(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr(workers, "PAIRS", SOME)
    found = workers.compare_workers(device)
    assert len(found) == 2 * len(workers.PAIRS)
    assert all(one.is_right for one in found), found


def test_a_byte_in_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a copy out of the staging pool that leaves its first placement out."""
    copy = caches.Caches._copy
    monkeypatch.setattr(
        caches.Caches, "_copy", lambda self, staging, of: copy(self, staging, of[1:])
    )
    monkeypatch.setattr(workers, "PAIRS", SOME[:1])
    direct, staged = workers.compare_workers("cpu")
    assert direct.is_right
    assert staged.wrong_bytes > 1000
    assert not staged.is_right


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda", "finds no CUDA device here: run this where"), ("tpu", "give one of cpu, cuda")],
)
def test_a_device_that_is_not_there_is_named(monkeypatch, device, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["verify", "--device", device])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
