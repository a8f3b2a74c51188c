"""When there is a host buffer, how large it is, and which blocks a step saves."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.releases import FACTS
from kvpatch.host_buffer.host_block_table import HostBlockTable, PublishedGroup
from kvpatch.host_buffer.policy import (
    block_bytes_of,
    host_blocks_in,
    is_wanted,
    is_wanted_here,
    refuse_shares,
)
from kvpatch.host_buffer.scheduler import HostBufferScheduler, UsageLog
from kvpatch.patches.host_buffer import put_back
from kvpatch.worker.envelope import SAVES

ALONE = {
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
KNOWN = {"cuda": ("cuda", "cpu"), "xpu": ("cpu",), "tpu": ("cpu",), "cpu": ("cpu",)}
#: Where a release has no mirror.
KNOWN_FIRST = {"cuda": ("cuda",)}


class TestIsWanted:
    @pytest.mark.parametrize(
        ("mode", "device", "buffer_device", "known", "expected"),
        [
            ("auto", "cpu", "cpu", KNOWN, False),
            ("auto", "cuda", "cuda", KNOWN, False),
            ("auto", "cuda", "cpu", KNOWN, False),  # the release's own mirror stays
            ("auto", "xpu", "cpu", KNOWN, False),
            ("auto", "tpu", "cpu", KNOWN, True),  # whose tensors have no storage
            ("auto", "npu", "npu", KNOWN, True),
            ("auto", "npu", "cuda", KNOWN, True),
            ("auto", "cpu", "cpu", KNOWN_FIRST, False),
            ("auto", "cuda", "cpu", KNOWN_FIRST, True),
            *(("always", device, "cuda", KNOWN, True) for device in ("cpu", "cuda", "npu")),
            ("never", "cpu", "cpu", KNOWN, False),
            ("never", "cuda", "cuda", KNOWN, False),
            ("never", "cuda", "cpu", KNOWN, False),
        ],
    )
    def test_by_itself_where_the_device_cannot_be_registered(
        self, mode: Any, device: str, buffer_device: str, known: Any, expected: bool
    ) -> None:
        assert is_wanted(mode, device, buffer_device, known) is expected

    @pytest.mark.parametrize(
        ("device", "buffer_device", "fact"),
        [("npu", "npu", "registers cpu, cuda, tpu"), ("npu", "cpu", "kv_buffer_device is cpu")],
    )
    def test_never_where_nothing_else_is_possible(
        self, device: str, buffer_device: str, fact: str
    ) -> None:
        with pytest.raises(RegistrationRefused, match=fact) as refused:
            is_wanted("never", device, buffer_device, KNOWN)
        assert "KVPATCH_HOST_BUFFER=never" in str(refused.value)
        assert device in str(refused.value)


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.parametrize(
    ("device", "release", "expected"),
    [
        ("cuda", "0.10.0", False),  # does not read the setting, and registers the GPU's memory
        ("cuda", "0.12.0", False),
        ("npu", "0.10.0", True),
    ],
)
def test_the_release_decides_what_a_buffers_device_means(
    monkeypatch: pytest.MonkeyPatch, mode: str, device: str, release: str, expected: bool
) -> None:
    facts = FACTS[release]
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=device))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)  # type: ignore[arg-type]
    module = SimpleNamespace(**{facts.device_table or "none": KNOWN})
    monkeypatch.setitem(sys.modules, facts.worker.module, module)  # type: ignore[arg-type]
    monkeypatch.setenv("KVPATCH_HOST_BUFFER", mode)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu"),
        parallel_config=SimpleNamespace(**ALONE),
    )
    if expected and mode == "never":
        with pytest.raises(RegistrationRefused, match="KVPATCH_HOST_BUFFER=never"):
            is_wanted_here(config, facts)
    else:
        assert is_wanted_here(config, facts) is expected


@pytest.mark.parametrize("share", list(ALONE))
def test_ranks_with_other_tokens_or_layers_are_refused(share: str) -> None:
    with pytest.raises(RegistrationRefused, match=share):
        refuse_shares(SimpleNamespace(**ALONE | {share: 2}), FACTS["0.12.0"])
    refuse_shares(SimpleNamespace(**ALONE), FACTS["0.12.0"])


@pytest.mark.parametrize(("budget", "expected"), [(1000, 10), (10_000, 50)])
def test_as_many_blocks_as_the_budget_holds_and_the_device_has(budget: int, expected: int) -> None:
    assert host_blocks_in(budget, 100, 50) == expected


def test_the_null_block_alone_is_refused_with_what_is_needed() -> None:
    with pytest.raises(RegistrationRefused, match="KVPATCH_HOST_BUFFER_BYTES to 200"):
        host_blocks_in(199, 100, 50)


_IN_HOST_MEMORY = {"size": 8000, "host_resident": True}


@pytest.mark.parametrize(
    ("release", "tensors", "expected"),
    [
        ("0.28.0", [{"size": 400}, {"size": 800}], 300),
        ("0.29.0", [{"size": 800}, {"size": 800}], 200),  # ranges of one allocation
        # Tensors in host memory are not counted.
        ("0.30.0", [{"size": 800, "host_resident": False}, _IN_HOST_MEMORY], 200),
    ],
)
def test_bytes_of_a_block(release: str, tensors: list[dict[str, int]], expected: int) -> None:
    plan = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(**t) for t in tensors], num_blocks=4)

    assert block_bytes_of(plan, FACTS[release]) == expected


def test_what_is_computed_in_a_block_rewrites_it_and_those_behind_it() -> None:
    """The lab saves prompts of many lengths, in chunks and windows."""
    full = PublishedGroup(block_tokens=16, last_blocks=0)

    assert full.written([5, 6, 7], start=16) == [6, 7]
    assert full.written([5, 6, 7], start=17) == [6, 7]
    assert full.written([0, 0, 7], start=0) == [7]


@dataclass(eq=False)
class _Request:
    request_id: str


class _Queue(deque[_Request]):
    """A stand-in for vLLM's queue, as far as it is used."""

    def remove_requests(self, requests: list[_Request]) -> None:
        kept = [request for request in self if request not in requests]
        self.clear()
        self.extend(kept)

    def add_request(self, request: _Request) -> None:
        self.append(request)


def test_held_requests_come_back_to_their_places_behind_preempted_ones() -> None:
    a, b, c, d, preempted = (_Request(name) for name in "abcdp")
    queue = _Queue([preempted, b, d])

    put_back(queue, [a, b, c, d], [a, c])

    assert list(queue) == [preempted, a, b, c, d]


def test_a_request_without_vllms_own_scheduler_is_refused() -> None:
    with pytest.raises(RegistrationRefused, match="Scheduler"):
        HostBufferScheduler(FACTS["0.33.0"]).admit(
            SimpleNamespace(request_id="r", num_prompt_tokens=1)
        )


class _Core:
    """Stands in for vLLM's scheduler: requests of two blocks of 16 tokens, and blocks' hashes."""

    def __init__(self, blocks: int) -> None:
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
        self.kv_cache_config = SimpleNamespace(
            kv_cache_tensors=[SimpleNamespace(size=blocks << 10)],
            num_blocks=blocks,
            kv_cache_groups=[group],
        )
        pool = SimpleNamespace(blocks=[SimpleNamespace(block_hash=None) for _ in range(blocks)])
        tables = SimpleNamespace(block_pool=pool, get_block_ids=lambda name: (self.held[name],))
        self.kv_cache_manager = tables
        self.requests: dict[str, Any] = {}
        self.held: dict[str, list[int]] = {}

    def request(self, name: str, blocks: list[int], prompt: int, computed: int) -> Any:
        """A request for another engine, of so many tokens."""
        self.held[name] = blocks
        self.requests[name] = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=prompt,
            num_computed_tokens=computed,
            kv_transfer_params={"do_remote_decode": True},
        )
        return self.requests[name]

    def saved(
        self, saves: HostBufferScheduler, name: str, blocks: list[int], *, computed: int = 0
    ) -> set[int]:
        """The device's blocks that are copied for a request, `computed` tokens of which it has."""
        request = self.request(name, blocks, 16 * len(blocks), computed)
        for block in blocks:  # as it is scheduled: full blocks are hashed
            self.kv_cache_manager.block_pool.blocks[block].block_hash = self.content[block]
        assert saves.admit(request)
        return set(_planned(saves, name, request.num_prompt_tokens - computed))

    content: Mapping[int, str | None] = {1: "a", 2: "b", 3: "c"}


def _planned(saves: HostBufferScheduler, name: str, tokens: int) -> tuple[int, ...]:
    """The device's blocks that a step of so many tokens of a request saves."""
    step = SimpleNamespace(num_scheduled_tokens={name: tokens})
    found = saves.plan(step, SimpleNamespace(reqs_to_recv={})).get(SAVES)
    return () if found is None else found.blocks


def _linked(**connectors: Any) -> tuple[_Core, HostBufferScheduler]:
    core, saves = _Core(8), HostBufferScheduler(FACTS["0.20.1"])
    saves.link(core, SimpleNamespace(**{"_is_hma_required": False, **connectors}))
    return core, saves


def test_a_prompt_that_comes_back_whole_is_saved_anew() -> None:
    """It was preempted behind its prompt, and its blocks are a prefix hit."""
    core, saves = _linked()
    assert core.saved(saves, "r", [1, 2]) == {1, 2}
    saves.release("r")
    assert core.saved(saves, "r", [1, 2, 3], computed=48) == {3}, "the others are held still"
    core.requests["r"].num_computed_tokens = 32
    assert _planned(saves, "r", 16) == (3,), "computed anew"


def test_a_window_that_has_left_the_prompt_is_not_published(caplog) -> None:
    core, saves = _linked(_is_hma_required=True, blocks_per_sw=[2])
    request = core.request("r", [0, 2, 3], 48, 32)
    assert saves.admit(request)
    assert _planned(saves, "r", 16) == (2, 3)

    core.held["r"], request.num_computed_tokens = [0, 0, 3, 4], 64
    released = SimpleNamespace(_reqs_need_send={"r": 1.0}, _reqs_not_processed=set())
    answer = True, {"remote_block_ids": [[3, 4]], "remote_num_tokens": 64}
    assert saves.finished(released, request, answer) == (False, None)
    assert "set max_tokens to 1" in caplog.text


def test_what_another_connector_has_written_is_saved_again() -> None:
    """A MultiConnector's may load into a block whose host block holds what was there before."""
    core, saves = _linked()
    assert core.saved(saves, "first", [1, 2]) == {1, 2}
    saves.release("first")
    assert core.saved(saves, "hit", [1, 3], computed=16) == {3}, "a prefix hit"
    saves.release("hit")

    core.content = {1: "other", 2: "b", 3: "c"}  # loaded, and not computed here
    assert core.saved(saves, "loaded", [1, 2], computed=16) == {1, 2}


@pytest.mark.parametrize("content", [None, "other"])
def test_a_block_that_was_partly_filled_is_saved_again(content: str | None) -> None:
    core, saves = _linked()
    core.content = {1: "a", 2: None}
    assert core.saved(saves, "first", [1, 2]) == {1, 2}
    saves.release("first")

    core.content = {1: "a", 2: content, 3: "c"}
    assert core.saved(saves, "loaded", [1, 2, 3], computed=32) == {2, 3}


# --- what the log says of host blocks ----------------------------------------------------


def test_host_blocks_in_use_are_said_now_and_then_and_when_none_is(caplog):
    now = [0.0]
    usage, table = UsageLog(lambda: now[0]), HostBlockTable(4)
    caplog.set_level(logging.INFO, "kvpatch.host_buffer")

    def said(at: float) -> list[str]:
        now[0] = at
        caplog.clear()
        usage.look(table)
        return [message.removeprefix("host buffer: ") for message in caplog.messages]

    in_all = "{} of 4 blocks reserved, {} of them filled; {} requests wait for blocks"
    assert said(11) == [], "nothing was ever in use"
    table.reserve("a", 3)
    table.save("a", [7])
    table.reserve("b", 2)
    assert said(9) == [], "too soon"
    assert said(12) == [in_all.format(3, 1, 1)]
    assert said(13) == []
    table.release("b")
    table.release("a")
    assert said(14) == [in_all.format(0, 0, 0)]
    assert said(40) == [], "said already"
    table.reserve("c", 1)
    assert len(said(41)) == 1
