"""What the proofs do to caches and count, with stand-ins for engines (no vLLM)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from experiments import proof_shown, proof_tables  # noqa: E402
from experiments.engines import clock, fault_loads, good_loads, lease_loads, load_costs  # noqa: E402
from experiments.engines.load_faults import FAULTS, Layer, Load  # noqa: E402
from experiments.engines.prompt_tokens import Excerpts, Words  # noqa: E402
from experiments.engines.proof_probe import (  # noqa: E402
    LANDED,
    LOADED,
    NAME,
    Spoiler,
    _before_steps,
    is_other,
    marked,
)
from experiments.engines.references import Prompt  # noqa: E402
from kvpatch.core.errors import RequestFailed  # noqa: E402
from kvpatch.geometry.dimension_order import KeyOrder  # noqa: E402
from kvpatch.geometry.memory import Memory  # noqa: E402
from kvpatch.verify.caches import LayerCache  # noqa: E402
from kvpatch.verify.handoff import Request  # noqa: E402
from tests.geometry.test_tiles import cache_of, planes_at, rows_of  # noqa: E402
from tests.geometry.whole_caches import LAYOUTS, CacheSizes  # noqa: E402

pytestmark = pytest.mark.serving

_TOKENS, _BLOCK, _LAYERS = 41, 8, 4
_LAST = _TOKENS - 1


def _layers(seed: int) -> list[Layer]:
    chance = torch.Generator().manual_seed(seed)

    def rows() -> Any:
        return torch.randn((_TOKENS, 2, 4), generator=chance)

    return [{"key": rows(), "value": rows()} for _ in range(_LAYERS)]


def _spoilt(fault: str, seed: int = 3) -> tuple[Load, list[Layer]]:
    """A load after the fault, and what it was."""
    load = Load(_layers(1), _layers(2), _BLOCK, random.Random(seed))
    before = [{name: rows.clone() for name, rows in layer.items()} for layer in load.layers]
    FAULTS[fault](load)
    return load, before


def _changed(load: Load, before: list[Layer]) -> set[tuple[int, str, int]]:
    """(layer, content, token) of all that is not what it was."""
    return {
        (number, name, token)
        for number, layer in enumerate(load.layers)
        for name, rows in layer.items()
        for token in range(_TOKENS)
        if not torch.equal(rows[token], before[number][name][token])
    }


def _places(layers: range | list[int], tokens: range, *names: str) -> set[tuple[int, str, int]]:
    return {(n, name, t) for n in layers for name in names or ("key", "value") for t in tokens}


_ALL, _MIDDLE = range(_LAYERS), [_LAYERS // 2]


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        ("whole context stale", _places(_ALL, range(_LAST))),
        ("another prompt's load, last token too", _places(_ALL, range(_TOKENS))),
        ("stale block, early", _places(_ALL, range(8))),
        ("stale block, middle", _places(_ALL, range(16, 24))),
        ("stale block, late", _places(_ALL, range(32, 40))),
        ("middle block zeroed in a middle layer", _places(_MIDDLE, range(16, 24))),
        ("heads swapped in a middle layer", _places(_MIDDLE, range(_LAST))),
        ("values doubled in a middle layer", _places(_MIDDLE, range(_LAST), "value")),
        ("all numbers times 1.125", _places(_ALL, range(_LAST))),
        ("last layer stale", _places([_LAYERS - 1], range(_LAST))),
        ("a layer from the one before it", _places(_MIDDLE, range(_LAST))),
        ("one token lost and one doubled", _places(_ALL, range(20, 21))),
        ("one key flipped, first layer", _places([0], range(20, 21), "key")),
        ("one key flipped, middle layer", _places(_MIDDLE, range(20, 21), "key")),
    ],
)
def test_a_fault_changes_what_it_says(fault: str, places: set[tuple[int, str, int]]) -> None:
    assert _changed(*_spoilt(fault)) == places


def test_one_wrong_byte_is_one_byte_in_front_of_the_last_token() -> None:
    for seed in range(50):
        load, before = _spoilt("one wrong byte", seed)
        ((layer, name, token),) = _changed(load, before)
        assert token < _LAST
        new, old = (rows[layer][name][token].view(torch.uint8) for rows in (load.layers, before))
        assert int((new != old).sum()) == 1


def test_two_blocks_swapped_hold_each_others_tokens() -> None:
    load, before = _spoilt("two blocks swapped")
    blocks = {token // _BLOCK for _, _, token in _changed(load, before)}
    assert len(blocks) == 2
    first, second = (slice(n * _BLOCK, (n + 1) * _BLOCK) for n in blocks)
    assert torch.equal(load.layers[0]["key"][first], before[0]["key"][second])


@pytest.mark.parametrize("layout", ["CPU_packed", "LBNHC", "LBHNC"])
def test_a_fault_comes_over_one_request_once(layout: str) -> None:
    """In its own blocks, whatever the layout, and nowhere else."""
    sizes = CacheSizes(1, 16, 2, _BLOCK, 8, 4)
    tensor = torch.randint(0, 255, (sizes.total_bytes(),), dtype=torch.uint8)
    planes = LAYOUTS[layout].planes(sizes, tensor.data_ptr(), Memory("DRAM"), ["layer"])
    layers = (LayerCache("layer", 0, _BLOCK, None, tensor, planes),)
    spoiler = Spoiler(False, layers, torch.float32)
    spoiler.keep_other(f"cmpl-{is_other(0)}7", [1, 3, 5], 20)
    name, blocks, before = f"{marked('whole context stale', 'D', 4)}7", [9, 4, 2], tensor.clone()

    spoiler.come_over(LANDED, "cmpl-7", blocks, 20)
    spoiler.come_over(LOADED, name, blocks, 20)
    assert torch.equal(tensor, before)

    spoiler.come_over(LANDED, name, blocks, 20)
    assert spoiler.spoilt == {name}
    now = [spoiler._rows(layers[0], ids, 20) for ids in (blocks, [1, 3, 5])]
    for content in ("key", "value"):
        mine, others = (rows[content].view(torch.uint8) for rows in now)
        assert torch.equal(mine[:19], others[:19])
        assert not torch.equal(mine[19], others[19])
    per_block = tensor.numel() // 16
    wrong = int((tensor != before).sum())
    assert 0 < wrong <= 3 * per_block

    after = tensor.clone()
    spoiler.others[0] = [{name: rows + 1 for name, rows in layer.items()} for layer in now[:1]]
    spoiler.come_over(LANDED, name, blocks, 20)
    assert torch.equal(tensor, after)


def test_what_is_in_tiles_is_read_and_spoilt_by_token() -> None:
    """bfloat16 on a CPU with AMX; packed by numpy."""
    tokens, order = 64, KeyOrder.TILED
    rows = rows_of(3, tokens)  # [kv, block, head, token, channel]
    tensor = torch.frombuffer(bytearray(cache_of(order, rows)), dtype=torch.uint8)
    planes = planes_at(order, tokens, tensor.data_ptr())
    layer = LayerCache("layer", 0, tokens, None, tensor, planes)
    spoiler = Spoiler(False, (layer,), torch.bfloat16)
    blocks = [4, 1]

    found = spoiler._rows(layer, blocks, tokens + 20)
    wanted = rows[:, blocks].transpose(0, 1, 3, 2, 4).reshape(2, 2 * tokens, -1, rows.shape[-1])
    for content, values in zip(("key", "value"), wanted, strict=True):
        assert np.array_equal(found[content].view(torch.int16).numpy().view(np.uint16), values[:84])

    spoiler._store(layer, blocks, {name: values.roll(1, 0) for name, values in found.items()})
    rows = rows.copy()
    for part, values in zip(rows, wanted, strict=True):
        values[:84] = np.roll(values[:84], 1, axis=0)
        part[blocks] = values.reshape(2, tokens, *values.shape[1:]).transpose(0, 2, 1, 3)
    assert tensor.numpy().tobytes() == cache_of(order, rows)


@pytest.mark.parametrize(
    ("is_p", "computed", "is_spoilt"),
    [(False, 19, True), (False, 0, False), (True, 0, False), (True, 19, False)],
)
def test_the_witness_faults_come_over_loads_at_d_alone(
    is_p: bool, computed: int, is_spoilt: bool
) -> None:
    """P has the same name, and of a prompt in pieces the blocks of the first one."""
    spoilt: list[str] = []
    spoiler: Any = SimpleNamespace(
        is_p=is_p,
        come_over=lambda moment, name, blocks, tokens: spoilt.append(name),
        keep_other=lambda *_: None,
    )
    worker = SimpleNamespace(execute_model=lambda scheduled: "computed")
    _before_steps(worker, spoiler)
    new = SimpleNamespace(
        req_id="a", prompt_token_ids=[0] * 20, block_ids=([3],), num_computed_tokens=computed
    )

    assert worker.execute_model(SimpleNamespace(scheduled_new_reqs=[new])) == "computed"
    assert spoilt == (["a"] if is_spoilt else [])


def test_a_name_is_found_in_an_engines_own() -> None:
    name = f"{marked('one wrong byte', 'P', 12)}{'a' * 32}"
    found = NAME.search(f"cmpl-{name}-0-77")
    assert found is not None and found[0] == name and found[1] == "P"
    assert NAME.search(f"cmpl-proof{'a' * 32}-0") is None


def test_prompts_are_as_long_as_said_and_some_begin_alike() -> None:
    words = Words(range(2, 900))
    found = list(good_loads.prompts(words, 400, seed=5))
    assert found == list(good_loads.prompts(words, 400, seed=5))
    assert min(map(len, found)) >= 20 and max(map(len, found)) <= 400
    assert 0.05 < 1 - len({p[:30] for p in found}) / 400 < 0.2  # the rest of a fifth is first


def test_counts_are_those_of_loads() -> None:
    pytest.importorskip("prometheus_client", reason="comes with vLLM")
    text = "\n".join(
        [
            "# TYPE kvpatch_load_digests counter",
            'kvpatch_load_digests_total{digest="alarm",engine="0",model_name="m"} 3.0',
            "# TYPE vllm:request_success counter",
            'vllm:request_success_total{engine="0",finished_reason="error"} 4.0',
            "",
        ]
    )
    assert good_loads.counts_in(text) == {"load_digests alarm": 3}


_ROW = fault_loads.Row(
    "64 to 64", "digests", "float32", "tiny Llama", "one wrong byte", "D", 130, 255
)


def test_what_nobody_noticed_is_told_by_whether_its_answer_was_another_one() -> None:
    served = [
        fault_loads.Served("a", 0, "failed", "HTTP 500"),
        fault_loads.Served("b", 0, "wrong"),
        fault_loads.Served("c", 0, "right"),
        fault_loads.Served("d", 0, "wrong"),
        fault_loads.Served("e", 0, "right"),
    ]
    noticed = fault_loads.Noticed({"a", "b", "c", "d"}, {"a"}, {"d"}, {"d"})
    row = fault_loads.row_of(replace(_ROW), served, noticed)
    assert (row.loads, row.not_spoilt) == (4, 1)
    assert (row.digest, row.witness, row.taken_back) == (1, 1, 1)
    assert (row.failed, row.right, row.wrong) == (1, 1, 2)
    assert (row.missed, row.missed_wrong, row.undone_wrong) == (2, 1, 1)
    assert row.said == {"HTTP 500": 1, "not spoilt, right: ": 1}


def _missed(*rows: Any) -> list[str]:
    return [goal.name.rpartition(": ")[2] for goal in proof_shown.goals(rows) if not goal.is_met]


def test_digests_may_miss_nothing_and_the_witness_what_it_has_missed_before() -> None:
    good = replace(_ROW, loads=10, digest=10, right=10)
    assert _missed(good) == []
    assert _missed(replace(good, missed=1)) == ["missed"]
    assert _missed(replace(_ROW, not_spoilt=10)) == ["loads spoilt"]
    alone = replace(good, by="witness", digest=0, missed=10)
    assert _missed(alone) == []
    stale = replace(alone, fault="stale block, middle")
    assert _missed(replace(stale, witness=6)) == ["noticed"]
    assert _missed(replace(stale, witness=7)) == []


def test_what_was_computed_instead_must_be_right() -> None:
    good = replace(_ROW, loads=10, digest=10, right=10)
    assert _missed(replace(good, undone_wrong=1)) == ["undone and wrong"]
    assert _missed(replace(good, failed=1)) == ["failed"]


_COUNTS = {"loads received": 9, "load_holds held": 9, "load_digests checked": 9}


def test_good_loads_that_nobody_looked_at_prove_nothing() -> None:
    good = good_loads.Row(
        "64 to 64", "float32", "m", 9, counts={**_COUNTS, "witnessed_loads good": 9}
    )
    assert _missed(good) == []
    assert _missed(replace(good, counts=_COUNTS)) == ["witnessed"]
    assert _missed(replace(good, counts={**good.counts, "load_digests alarm": 1})) == [
        "digest alarms"
    ]
    assert _missed(replace(good, wrong=1)) == ["wrong answers"]
    columns, ((*shown,),) = proof_tables.good_rows([asdict(good)])
    assert dict(zip(columns[3:8], shown[3:8], strict=True)) == {
        "loads": "9",
        "stale": "0",
        "hold not stated": "0",
        "digest: checked": "9",
        "partly": "0",
    }
    assert len(columns) == len(shown)


def test_each_number_that_is_shown_has_a_name() -> None:
    good = good_loads.Row("64 to 64", "float32", "m", 9, counts=_COUNTS, seconds=1.0)
    late = lease_loads.Row("both", "float32", "m", 8, failed=8, counts={"load_holds gone": 8})
    cost = load_costs.row_of("holds", "float32", "m", [[(0.1, 0.11), (0.1, 0.12)], [(0.1, 0.1)]])
    assert (cost.turns, round(cost.ratio, 2), round(cost.with_ms)) == (3, 1.1, 110)
    assert [round(ratio, 2) for ratio in cost.of_starts] == [1.15, 1.0]
    for table in (
        proof_shown.good_table([good]),
        proof_shown.fault_table([_ROW]),
        proof_shown.lease_table([late]),
        proof_shown.cost_table([cost]),
    ):
        assert all(column.header and list(column.cells) for column in table.columns)
    sums = ({"holds": 2e-5, "witness": 0.0}, {"holds": 4e-5, "witness": 4e-3})
    clocked = load_costs.clocked_rows("float32", "m", [0.1, 0.1, 0.3, 0.1], sums)
    assert [round(1e6 * row.share) for row in clocked] == [150, 10000]
    assert proof_shown.clocked_table(clocked).row_count == 2
    for rows in (proof_tables.lease_rows, proof_tables.cost_rows, proof_tables.clocked_rows):
        columns, (shown, *_) = rows([asdict(late), asdict(cost), *map(asdict, clocked)])
        assert len(columns) == len(shown)
    assert _missed(late, cost, *clocked) == ["time to first token, of stock's"]
    assert _missed(replace(clocked[1], of_d_ms=1.1)) == ["of the time to first token, by a clock"]
    assert _missed(replace(late, wrong=1)) == ["wrong answers"]


def test_a_clock_has_the_wait_for_an_answer_from_the_first_time_it_is_asked_for() -> None:
    """And of what is called in a step the call alone."""

    class Check:
        looks = 0

        def answer(self, nixl: Any) -> bool | None:
            self.looks += 1
            return True if self.looks == 2 else None

    watch, check = clock.Clock(), Check()
    answer = watch._waited_for(Check.answer)
    assert answer(check, None) is None
    assert watch.take()["holds"] == 0.0
    time.sleep(0.02)
    assert answer(check, None)
    assert watch.take()["holds"] >= 0.02
    assert watch._timed("witness", lambda: time.sleep(0.01) or 7)() == 7
    assert watch.take()["witness"] >= 0.01
    assert watch.take() == {"holds": 0.0, "witness": 0.0}


def test_what_a_clock_is_set_around_is_there() -> None:
    for calls in clock._calls().values():
        for owner, names in calls.items():
            assert all(callable(getattr(owner, name)) for name in names)


def test_tables_tell_digests_from_the_witness() -> None:
    digests = replace(_ROW, loads=10, digest=10, right=9, wrong=1, undone_wrong=1)
    witness = replace(
        _ROW, by="witness", loads=8, witness=3, taken_back=2, missed=5, missed_wrong=2, wrong=5
    )
    longer = replace(witness, shortest=256, longest=511, witness=4, missed=4)
    raw = [asdict(row) for row in (digests, replace(digests, pair="128 to 32"), witness, longer)]

    columns, rows = proof_tables.fault_rows(raw)
    of = ["one wrong byte", "float32", "tiny Llama"]
    assert rows == [[*of, "20 of 20", "3 of 8", "4 of 8", "4 of 9"]]
    assert len(columns) == len(rows[0])

    columns, rows = proof_tables.recovery_rows(raw)
    of = ["float32", "tiny Llama"]
    assert rows == [
        ["digests", "64 to 64", *of, "10", "10", "10", "9", "1", "0"],
        ["digests", "128 to 32", *of, "10", "10", "10", "9", "1", "0"],
        ["witness", "64 to 64", *of, "16", "7", "4", "4", "0", "0"],
    ]
    assert len(columns) == len(rows[0])


def _faults(prompts: Sequence[Sequence[Prompt]]) -> Any:
    engines: list[Any] = [SimpleNamespace(url=url) for url in ("p", "d")]
    client: Any = SimpleNamespace()
    played: Any = SimpleNamespace(model="m")
    return fault_loads.Faults(client, played, *engines, Words((1, 2)), prompts)


def test_requests_that_fail_are_counted_and_kept() -> None:
    async def fails(*_: Any) -> Any:
        raise RequestFailed("http://d: HTTP 500: no", "look into its log")

    faults = _faults([[Prompt((1, 2), (3,))] * 2 for _ in fault_loads.LENGTHS])
    faults._answer = fails

    found = asyncio.run(faults.one("one wrong byte", "D", 4))

    assert (found.outcome, found.length) == ("failed", 1)
    assert "500: no" in found.said and NAME.fullmatch(found.name)


def test_each_fault_comes_over_all_prompts_and_no_load_finds_another_ones_blocks() -> None:
    of_length = len(fault_loads.LENGTHS)
    prompts = [[Prompt((n, m), (n,)) for m in range(3)] for n in range(of_length)]
    asked = []

    async def answer(request: Request, _: Any) -> tuple[int, ...]:
        asked.append((request.cache_salt, request.token_ids))
        return request.token_ids[:1]

    faults = _faults(prompts)
    faults._answer = answer
    kinds = [("one wrong byte", "D"), ("one wrong byte", "L"), ("two blocks swapped", "D")]
    for fault, moment in kinds:
        for number in range(1, 3 * of_length + 1):
            assert asyncio.run(faults.one(fault, moment, number)).outcome == "right"

    every = {prompt.token_ids for same in prompts for prompt in same}
    by_salt = {salt: [own for its, own in asked if its == salt] for salt, _ in asked}
    assert len(by_salt) == len(kinds) and "" not in by_salt
    assert all(len(own) == 3 * of_length and set(own) == every for own in by_salt.values())


def test_the_pair_whose_turn_it_is_not_stands_still() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            engines: Any = SimpleNamespace(group=process.pid), SimpleNamespace(group=None)
            with load_costs._at_rest(engines):
                _wait_for_state(process.pid, "T")
            _wait_for_state(process.pid, "R")
        finally:
            process.kill()


def _wait_for_state(process: int, state: str) -> None:
    stat, until = Path(f"/proc/{process}/stat"), time.monotonic() + 10
    while stat.read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < until, f"never in state {state}"
        time.sleep(0.01)


def test_excerpts_are_of_the_text_in_its_order() -> None:
    text = range(100, 200)
    found = Excerpts(text).draw(random.Random(3), 20)
    assert found == tuple(range(found[0], found[0] + 20)) and found[-1] < 200
    assert Excerpts(text).draw(random.Random(3), 100) == tuple(text)
    assert len({Excerpts(text).draw(random.Random(seed), 20) for seed in range(20)}) > 5
