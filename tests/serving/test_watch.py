"""The probe's bookkeeping: which blocks a request holds, and when it is fingerprinted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.geometry.plane import Memory

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvpatch.tools.verify.probe import (  # noqa: E402
    LOADED,
    PREFILLED,
    CacheProbe,
    ProbedLayer,  # noqa: E402
    Watch,
)
from tests.geometry.whole_caches import LAYOUTS, CacheSizes  # noqa: E402

pytestmark = pytest.mark.serving


def _layer(window_tokens: int | None = None) -> ProbedLayer:
    sizes = CacheSizes(1, 16, 2, 4, 8, 2)
    tensor = torch.arange(sizes.total_bytes(), dtype=torch.int64).to(torch.uint8)
    planes = LAYOUTS["CPU_packed"].planes(sizes, tensor.data_ptr(), Memory("DRAM"))
    return ProbedLayer("layer", 0, 4, window_tokens, tensor, planes)


def _step(new: list[Any] = (), cached: dict[str, Any] | None = None, **scheduled: int) -> Any:
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[blocks for blocks, _ in cached.values()],
            num_computed_tokens=[tokens for _, tokens in cached.values()],
        ),
        num_scheduled_tokens=scheduled,
    )


def _new(name: str, prompt: int, blocks: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[0] * prompt,
        block_ids=(blocks,),
        num_computed_tokens=computed,
    )


def test_a_chunked_prefill_is_noted_once_with_all_its_blocks() -> None:
    watch = Watch(PREFILLED, (_layer(),))
    for step in (
        _step([_new("a", 10, [3, 1])], a=6),
        _step(cached={"a": (([5],), 6)}, a=4),
        _step(cached={"a": (None, 10)}, a=1),
    ):
        watch.before(step)
        watch.after(step)
    (record,) = watch.records
    assert record["block_ids"] == [[3, 1, 5]]
    assert record["prompt_tokens"] == 10
    assert record["computed_tokens"] == 6


def test_a_decode_engine_is_read_before_its_first_step() -> None:
    watch = Watch(LOADED, (_layer(),))
    watch.before(_step([_new("a", 10, [3, 1, 5], computed=9)], a=1))
    (record,) = watch.records
    assert record["computed_tokens"] == 9
    assert sorted(record["layers"]["layer"]) == ["key/0", "key/1", "value/0", "value/1"]


@pytest.mark.parametrize(("prompt", "spoiled"), [(1, 3), (4, 3), (7, 3), (8, 1), (11, 1)])
def test_corruption_spoils_one_block_and_no_other(prompt: int, spoiled: int) -> None:
    layer = _layer()
    watch = Watch(LOADED, (layer,), corrupt=True)
    before = layer.tensor.clone()
    watch.before(_step([_new("a", prompt, [3, 1, 5], computed=prompt - 1)], a=1))
    changed = {
        int(index) // (layer.tensor.numel() // 16)
        for index in (before != layer.tensor).nonzero().flatten()
    }
    assert changed == {spoiled}
    clean = Watch(LOADED, (_layer(),))
    clean.before(_step([_new("a", prompt, [3, 1, 5], computed=prompt - 1)], a=1))
    assert clean.records[0]["layers"] != watch.records[0]["layers"]


def test_a_sliding_window_ignores_what_it_no_longer_sees() -> None:
    def digests(block: int) -> Any:
        layer = _layer(window_tokens=4)
        watch = Watch(LOADED, (layer,))
        watch.before(_step([_new("a", 10, [block, 1, 5], computed=9)], a=1))
        return watch.records[0]["layers"]

    assert digests(0) == digests(3)


def test_the_probe_watches_one_worker_and_not_its_class() -> None:
    class Worker(CacheProbe):
        def execute_model(self, step: Any) -> str:
            return "done"

    watched, other = Worker(), Worker()
    with pytest.raises(ValueError, match="found 'sometime'"):
        watched.kvpatch_watch("sometime")
    with pytest.raises(RuntimeError, match="kvpatch_watch first"):
        watched.kvpatch_corrupt("true")
    assert watched.kvpatch_records() == []
    watch = Watch(LOADED, (_layer(),))
    from kvpatch.tools.verify.probe import _observe

    _observe(watched, watch)
    step = _step([_new("a", 3, [2], computed=2)], a=1)
    assert watched.execute_model(step) == other.execute_model(step) == "done"
    assert [record["request"] for record in watched.kvpatch_records()] == ["a"]
    assert watched.kvpatch_records() == other.kvpatch_records() == []
    assert "execute_model" not in vars(other)
