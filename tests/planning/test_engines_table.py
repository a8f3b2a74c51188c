"""A plan says of every pair of real engines' tables what they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.engines.pairs import ROWS, Row, Side
from experiments.engines.recorded import HYBRID_RANKS, TITLES
from kvpatch.tools.planning.arguments import EngineArguments
from kvpatch.tools.planning.engine import engine_of
from kvpatch.tools.planning.ours import judged_by_kvpatch
from kvpatch.tools.planning.pair import Outcome, Pair
from kvpatch.tools.planning.stock import stock_verdict

pytestmark = pytest.mark.patching

_FOLDER = Path(__file__).parents[2] / "docs" / "data"
DATA = json.loads((_FOLDER / "engines.json").read_text())
RANKS = json.loads((_FOLDER / "hybrid_ranks.json").read_text())
_SHOWN = {**TITLES, **HYBRID_RANKS}
SEEN = {title: (stock, ours) for title, stock, ours in (*DATA["rows"], *RANKS["rows"])}
PAIRS = {row.name: row for row in ROWS if row.name in _SHOWN}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "torch_dtype": "float32",
}
#: As experiments/engines/models.py makes them.
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "window": {
        **_LLAMA,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 40,
    },
    "hybrid": {
        **_LLAMA,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
}
_FAIL, _WRONG, _ENDS = "fail", "wrong tokens", "D ends"


def _pairs(row: Row, folder: Path) -> list[Pair]:
    config = folder / "config.json"
    config.write_text(json.dumps(MODELS[row.single.model]))

    def engine(role: Any, side: Side) -> Any:
        arguments = EngineArguments(
            source=role,
            options={
                "model": "tiny",
                "block_size": side.block_tokens,
                "tensor_parallel_size": side.ranks,
                "dtype": "float32",
                "kv_transfer_config": {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_buffer_device": "cpu",
                },
            },
            about={
                "release": DATA["release"],
                "platform": "cpu",
                # The project's own attention in torch keeps rows, as FlashAttention does.
                "attention-backend": "FLASH_ATTN" if row.single.torch_attention else "CPU_ATTN",
            },
            environment={
                "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
                **({"VLLM_KV_CACHE_LAYOUT": side.layout} if side.layout else {}),
            },
        )
        return engine_of(role, arguments, config)

    return [Pair(engine("P", side), engine("D", row.decode)) for side in row.prefill]


def _said_of_stock(row: Row, folder: Path) -> set[str]:
    """Which of the table's words the plan has for the row's pairs, over prompts of all lengths."""
    words = {
        Outcome.REFUSED: _FAIL,
        Outcome.CRASH: _ENDS,
        Outcome.WRONG: _WRONG,
        Outcome.IDENTICAL: "identical",
    }
    found = set()
    for pair in _pairs(row, folder):
        verdicts = [stock_verdict(pair, request) for request in pair.requests(400)]
        found.add(words[max(verdicts, key=lambda v: v.outcome.badness).outcome])
    return found


def _seen(text: str) -> set[str]:
    return {word for word in (_FAIL, _WRONG, _ENDS, "identical") if word in text}


def test_the_table_has_pairs():
    assert {_SHOWN[name] for name in PAIRS} == set(SEEN)
    assert DATA["release"] == RANKS["release"]


@pytest.mark.parametrize("name", PAIRS)
def test_stock_does_what_a_plan_says(name, tmp_path):
    assert _said_of_stock(PAIRS[name], tmp_path) == _seen(SEEN[_SHOWN[name]][0])


@pytest.mark.parametrize("name", PAIRS)
def test_kvpatch_does_what_a_plan_says(name, tmp_path):
    """And on whose path."""
    on_stocks_path = "stock's path" in SEEN[_SHOWN[name]][1]
    for pair in _pairs(PAIRS[name], tmp_path):
        for request in pair.requests(400):
            judged = judged_by_kvpatch(pair, request)
            assert judged.verdict.outcome is Outcome.IDENTICAL, judged.verdict
            assert (judged.way == "vLLM's own") == on_stocks_path


def test_stock_ends_where_the_second_request_finds_the_first_ones_handshake(tmp_path):
    """As D's log had it: an assertion at the first request, an IndexError at the next."""
    (pair,) = _pairs(PAIRS["hybrid-tp2-tp1"], tmp_path)

    for request in pair.requests(400):
        said = stock_verdict(pair, request)
        assert said.outcome is Outcome.CRASH
        assert "D ends at the next request" in said.reason


def test_negative_control_a_row_of_another_pair_is_noticed(tmp_path):
    said = {name: _said_of_stock(row, tmp_path) for name, row in PAIRS.items()}

    assert said["128-32"] != _seen(SEEN[_SHOWN["32-128"]][0])
    assert said["64-64"] != _seen(SEEN[_SHOWN["128-32"]][0])
    assert said["2p1d"] != _seen(SEEN[_SHOWN["128-32"]][0])
