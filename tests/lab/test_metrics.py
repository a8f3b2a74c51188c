"""What an operator sees of loads, by way of the release's own statistics and its own metrics.

The same counts go to a front end with kvpatch and to one without: that one shows and logs what it
would have without kvpatch anywhere.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.peer.engine_description import unpacked
from kvpatch.peer.peer_hash import digest_of

from . import test_stale_blocks as stale_blocks
from .case import EngineSpec
from .engine_api import Prompt, Told
from .host import Lab
from .stage import Actor, Stage
from .test_failures import STAGED, UNREADABLE
from .test_host_buffer import ALWAYS, ROOM, prefilling, stated
from .test_several_peers import SPEC, TOKENS, assert_identical, engine, introduce
from .test_staged_reads import late_read

pytestmark = [pytest.mark.lab, pytest.mark.one_per_generation, pytest.mark.on(stats=True)]

_LOADED = {
    "received": "kvpatch_loads_total received",
    "failed": "kvpatch_loads_total failed",
    "stale": "kvpatch_loads_total stale",
}
_REFUSED = "kvpatch_refusals_total PeerRefused"
_REFUSED_SECONDS = 20.0
#: P's and D's engines, by the way that D reads.
WAYS = {
    "stock": (SPEC, SPEC),
    "direct": (engine(block_tokens=32), replace(SPEC, settings=(("KVPATCH_TRANSFER", "direct"),))),
    "staged": (engine(block_tokens=32), STAGED),
    "host_buffer": (SPEC, replace(SPEC, settings=ALWAYS)),
}


@dataclass(frozen=True)
class Teller:
    """An engine with kvpatch, and what its front ends are told."""

    actor: Actor
    release: str

    def tell(self) -> dict[str, float]:
        """kvpatch's and NIXL's metrics since the last time; the stock front end's are held to it.

        Returns:
            Those that are not 0.
        """
        ours, stock = self._told()
        is_ours = {name: name.startswith("kvpatch_") for name in (*ours.shown, *stock.shown)}
        assert not any(is_ours[name] for name in stock.shown)
        assert {name: v for name, v in ours.shown.items() if not is_ours[name]} == stock.shown
        assert ours.logged == stock.logged
        return {name: value for name, value in ours.shown.items() if value}

    def _told(self) -> tuple[Told, Told]:
        told: tuple[Told, Told] = self.actor.call(
            "tell", FACTS[self.release].asks_scheduler_for_stats
        )
        return told


def _told_pair(stage: Stage, lab: Lab, p: EngineSpec, d: EngineSpec) -> tuple[Actor, Teller]:
    """P, and a D that has met it and told all of that."""
    prefill, decode = stage.prefill(p), stage.decode(d)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    teller = Teller(decode, lab.release)
    teller.tell()
    return prefill, teller


def _read(stage: Stage, prefill: Actor, decode: Actor, count: int) -> list[Prompt]:
    prompts = stage.prompts(count, TOKENS)
    decode.ask(*prefill.compute(*prompts))
    assert_identical(decode, prompts, count * TOKENS)
    return prompts


@pytest.mark.parametrize("way", WAYS)
def test_reads_are_told_by_way(stage: Stage, lab: Lab, way: str) -> None:
    p, d = stated(WAYS[way], lab.release) if way == "host_buffer" else WAYS[way]
    prefill, teller = _told_pair(stage, lab, p, d)

    _read(stage, prefill, teller.actor, 3)
    shown = teller.tell()

    assert shown[f"kvpatch_reads_total {way}"] == 3
    assert shown[_LOADED["received"]] == 3
    holds = {name: value for name, value in shown.items() if "_holds_" in name}
    assert holds == {"kvpatch_load_holds_total unproven": 3}, "P has no kvpatch"
    assert not {_LOADED["failed"], _LOADED["stale"]} & shown.keys()
    size_bytes = shown[f"kvpatch_read_bytes_total {way}"]
    assert size_bytes == shown["vllm:nixl_bytes_transferred_sum"]
    assert size_bytes >= 3 * TOKENS * SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim * 4
    assert shown[f"kvpatch_read_seconds_total {way}"] == pytest.approx(
        shown["vllm:nixl_xfer_time_seconds_sum"]
    )
    others = {name for name in shown if name.startswith("kvpatch_read")} - {
        f"kvpatch_{what}_total {way}" for what in ("reads", "read_bytes", "read_seconds")
    }
    assert not others
    assert teller.tell() == {}, "all of it was told"


def test_what_the_pool_holds_is_told_when_it_changes(stage: Stage, lab: Lab) -> None:
    prefill, decode = (stage.prefill(WAYS["staged"][0]), stage.decode(STAGED))
    teller = Teller(decode, lab.release)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    size_bytes = int(dict(STAGED.settings)["KVPATCH_STAGING_BYTES"])
    assert teller.tell()["kvpatch_staging_pool_bytes 0"] == size_bytes

    _read(stage, prefill, decode, 8)
    shown = teller.tell()

    assert 1 <= shown["kvpatch_staging_pool_waits_total"] <= 7, "one reads and others wait"
    assert "kvpatch_staging_pool_waiting_reads 0" not in shown
    assert "kvpatch_staging_pool_used_bytes 0" not in shown


def test_two_workers_are_one_engine(stage: Stage, lab: Lab) -> None:
    prefill, teller = _told_pair(stage, lab, engine(tp_size=2), engine(tp_size=2))

    _read(stage, prefill, teller.actor, 2)

    shown = teller.tell()
    assert shown["kvpatch_reads_total stock"] == shown[_LOADED["received"]] == 4
    assert shown["kvpatch_load_holds_total unproven"] == 4


def test_a_peer_that_is_refused(stage: Stage, lab: Lab) -> None:
    """Its load fails, which is no read: what vLLM logs of reads is not touched by it."""
    refusing, decode = stage.prefill(engine(**UNREADABLE)), stage.decode(STAGED)
    teller = Teller(decode, lab.release)
    (prompt,) = stage.prompts(1, TOKENS)

    decode.ask(*refusing.compute(prompt))
    shown: Counter[str] = Counter()
    end = time.monotonic() + _REFUSED_SECONDS
    while not (shown[_REFUSED] and shown[_LOADED["failed"]]):
        assert time.monotonic() < end, shown
        decode.watch(prompt, seconds=0.5)
        shown.update(teller.tell())

    assert shown[_LOADED["failed"]] == 1
    assert not shown[_LOADED["received"]]


def test_a_peer_that_dies_fails_each_load_once(stage: Stage, lab: Lab) -> None:
    mortal, teller = _told_pair(stage, lab, *WAYS["staged"])
    decode = teller.actor
    lost = stage.prompts(3, TOKENS)
    asks = mortal.compute(*lost)

    mortal.hold()
    decode.ask(*asks)
    mortal.die()

    decode.must_fail(*lost)
    assert teller.tell()[_LOADED["failed"]] == 3


def test_blocks_that_p_has_given_away(stage: Stage, lab: Lab) -> None:
    prefill, decode = stale_blocks.prefill(stage, SPEC, patched=True), stage.decode(SPEC)
    introduce(decode, stage.prompts(1, TOKENS), prefill)
    scene = stale_blocks.Scene(stage, lab.release, {}, decode)
    teller = Teller(decode, lab.release)
    teller.tell()
    kept, ask = scene.fresh(prefill)
    decode.ask(ask)
    decode.must_receive(kept)
    shown = teller.tell()
    assert shown["kvpatch_load_holds_total held"] == shown["kvpatch_reads_total stock"] == 1
    assert shown[_LOADED["received"]] == 1
    stale, ask = scene.stale(prefill)

    decode.ask(ask)
    decode.watch(stale)
    shown = teller.tell()

    assert shown["kvpatch_load_holds_total gone"] == shown[_LOADED["stale"]] == 1
    assert not {name for name in shown if "_reads_" in name or "received" in name}
    assert _LOADED["failed"] not in shown


def test_blocks_that_p_may_have_given_away(stage: Stage, lab: Lab) -> None:
    """P says nothing of them, and D gives the read up by its age."""
    late = late_read(lab, stage, lambda decode: Teller(decode, lab.release).tell())

    shown = Teller(late.decode, lab.release).tell()

    assert late.waits.name in late.seen.failed
    stale = len(late.seen.failed)
    assert shown["kvpatch_load_holds_total expired"] == shown[_LOADED["stale"]] == stale
    received = len(late.seen.received)
    assert shown.get("kvpatch_load_holds_total unproven", 0) == received
    assert shown.get(_LOADED["received"], 0) == received
    assert _LOADED["failed"] not in shown


def test_a_host_buffer(stage: Stage, lab: Lab) -> None:
    prefill = stage.start(prefilling(ROOM, planned_blocks=200))
    teller = Teller(prefill, lab.release)
    prompts = stage.prompts(2, TOKENS)
    prefill.call("begin", prompts)
    prefill.call("work")

    shown = teller.tell()

    blocks = 2 * -(-TOKENS // prefill.spec.block_tokens)
    assert shown["kvpatch_host_buffer_saved_blocks_total"] == blocks
    assert shown["kvpatch_host_buffer_save_seconds_total"] > 0
    of_scheduler = {
        name: value for name, value in shown.items() if name.startswith("kvpatch_host_buffer_bl")
    }
    if not FACTS[lab.release].asks_scheduler_for_stats:
        assert of_scheduler == {}
        return
    assert of_scheduler == {
        "kvpatch_host_buffer_blocks all": ROOM,
        "kvpatch_host_buffer_blocks reserved": blocks,
        "kvpatch_host_buffer_blocks filled": blocks,
    }


@pytest.mark.every_release
@pytest.mark.on(server_arguments=True)
def test_an_engine_describes_itself(stage: Stage, lab: Lab) -> None:
    spec = engine(block_tokens=32)
    prefill, decode = stage.prefill(spec), stage.decode(spec)
    teller = Teller(decode, lab.release)
    introduce(decode, stage.prompts(1, TOKENS), prefill)

    (name,) = (name for name in teller.tell() if name.startswith("kvpatch_description "))
    found = unpacked(name.partition(" ")[2])

    caches, hashed = found["caches"], found["hash"]
    assert found["about"]["release"] == lab.release
    assert (caches["block_tokens"], caches["kv_heads"]) == (spec.block_tokens, spec.kv_heads)
    shapes = {(one["kv_heads"], one["head_dim"]) for one in caches["layers"]}
    assert (len(caches["layers"]), shapes) == (spec.layers, {(spec.kv_heads, spec.head_dim)})
    names = FACTS[lab.release].hash_factors
    assert digest_of({one: hashed["factors"][one] for one in names}) == hashed["digest"]
    assert teller.tell() == {}, "it is told once"
