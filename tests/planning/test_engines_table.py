"""A plan says of every pair of real engines' tables what they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.engines.pairs import ROWS, Row, Side
from experiments.engines.recorded import HYBRID_RANKS, TITLES
from kvpatch.tools.planning.arguments import Description, EngineArguments
from kvpatch.tools.planning.engine import Pair, engine_of
from kvpatch.tools.planning.verdicts import Outcome, verdicts
from tests.lab.case import EngineSpec

from .cells import state_caches

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
    "hybrid": {},  # described
}
_FAIL, _WRONG = "fail", "wrong tokens"


def _pairs(row: Row, folder: Path) -> list[Pair]:
    config = folder / "config.json"
    config.write_text(json.dumps(MODELS[row.single.model]))

    def described(side: Side) -> Description:
        spec = EngineSpec(
            "cpu", "HND", side.block_tokens, 48, dtype="float32", layers=4, kv_heads=4, head_dim=32,
            tp_size=side.ranks, has_state=True, state_kind="mamba2, one group",
        )  # fmt: skip
        return Description(DATA["release"], state_caches(spec))

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
            described=described(side) if row.single.model == "hybrid" else None,
        )
        return engine_of(role, arguments, config)

    return [Pair(engine("P", side), engine("D", row.decode)) for side in row.prefill]


def _said_of_stock(row: Row, folder: Path) -> set[str]:
    """The table's words for the verdicts on the row's pairs."""
    words = {Outcome.REFUSED: _FAIL, Outcome.WRONG: _WRONG, Outcome.IDENTICAL: "identical"}
    return {words[verdicts(pair)[0].outcome] for pair in _pairs(row, folder)}


def _seen(text: str) -> set[str]:
    """A plan says of an engine that ends that it refuses."""
    text = text.replace("D ends", _FAIL)
    return {word for word in (_FAIL, _WRONG, "identical") if word in text}


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
        _, found = verdicts(pair)
        assert found.outcome is Outcome.IDENTICAL, found
        assert (found.way == "vLLM's own") == on_stocks_path


def test_negative_control_a_row_of_another_pair_is_noticed(tmp_path):
    said = {name: _said_of_stock(row, tmp_path) for name, row in PAIRS.items()}

    assert said["128-32"] != _seen(SEEN[_SHOWN["32-128"]][0])
    assert said["64-64"] != _seen(SEEN[_SHOWN["128-32"]][0])
    assert said["2p1d"] != _seen(SEEN[_SHOWN["128-32"]][0])
