"""What follows from arguments and a model's configuration, and what is compared of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpatch.core.errors import BadOptions
from kvpatch.tools.planning.engine import Pair
from kvpatch.tools.planning.verdicts import Outcome, verdicts

from .walk import CONFIG, extra, planned_engine

pytestmark = pytest.mark.patching


def _pair(folder: Path, p: dict[str, Any], d: dict[str, Any]) -> Pair:
    sides = (("p", p), ("d", d))
    return Pair(*(planned_engine(folder, role, **{"block_size": 64, **of}) for role, of in sides))


def test_the_newest_of_the_hub_cache_is_found(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    assert planned_engine(tmp_path, "p", model="org/name").caches.layers[31:]


def test_an_option_is_compared_word_by_word(tmp_path):
    """The same bytes, and another hash: `auto` is not `bfloat16`."""
    found, _ = verdicts(_pair(tmp_path, {}, {"kv_cache_dtype": "bfloat16"}))

    assert found.outcome is Outcome.REFUSED and "--kv-cache-dtype" in found.reason


def test_checks_that_are_switched_off_are_not_taken_for_made(tmp_path):
    off = extra(enforce_handshake_compat=False)
    pair = _pair(tmp_path, {}, {"dtype": "float16", **off})

    assert [one.outcome for one in verdicts(pair)] == [Outcome.WRONG, Outcome.REFUSED]


@pytest.mark.parametrize(
    ("tokens", "method", "outcome"),
    [(64, "eagle", Outcome.IDENTICAL), (128, "ngram", Outcome.IDENTICAL), (128, "eagle", None)],
)
def test_drafts_with_layers_are_planned_between_like_engines(tmp_path, tokens, method, outcome):
    drafts = {"speculative_config": json.dumps({"method": method, "model": "m"})}
    pair = _pair(tmp_path, {**drafts, "block_size": tokens}, drafts)

    if outcome is None:
        with pytest.raises(BadOptions, match="drafts with layers"):
            verdicts(pair)
    else:
        assert verdicts(pair)[1].outcome is outcome


def test_tiles_of_a_cpu_are_told_by_its_processor(tmp_path):
    """Keys of bfloat16 on a CPU with AMX are read from like blocks alone, where nobody says it."""
    outcomes = []
    for amx in (None, True, False):
        pair = _of_cpus(tmp_path, amx, amx)
        outcomes.append(verdicts(pair)[1].outcome)
        assert any("AMX" in line for line in pair.decode.assumed) == (amx is None)

    assert outcomes == [Outcome.REFUSED] * 3


def _of_cpus(folder, p_amx, d_amx, p_tokens=128, p_env=None, **d_env):
    of_cpu = {"platform": "cpu", "attention-backend": "CPU_ATTN"}
    p = {"about": {**of_cpu, "amx": p_amx, "env": p_env or {}}, "block_size": p_tokens}
    d = {"about": {**of_cpu, "amx": d_amx, "env": {"ENABLE_KVPATCH": "true", **d_env}}}
    return _pair(folder, p, d)


@pytest.mark.parametrize("d_amx", [True, False])
@pytest.mark.parametrize("p_amx", [True, False])
def test_tiles_are_read_where_p_states_them(tmp_path, p_amx, d_amx):
    pair = _of_cpus(tmp_path, p_amx, d_amx, p_env={"ENABLE_KVPATCH": "true"})

    assert verdicts(pair)[1].outcome is Outcome.IDENTICAL


@pytest.mark.parametrize("p_amx", [True, False])
def test_stock_takes_unlike_processors_for_each_other(tmp_path, p_amx):
    """Blocks of one size; kvpatch reads them where P states the order of its keys."""
    unsaid = _of_cpus(tmp_path, p_amx, not p_amx, p_tokens=64)
    on = {"ENABLE_KVPATCH": "true"}
    said = _of_cpus(tmp_path, p_amx, not p_amx, p_tokens=64, p_env=on)

    for found in verdicts(unsaid):
        assert found.outcome is Outcome.WRONG and "AMX" in found.reason
    assert verdicts(said)[1].outcome is Outcome.IDENTICAL
    alike = _of_cpus(tmp_path, p_amx, p_amx, p_tokens=64)
    assert verdicts(alike)[0].outcome is Outcome.IDENTICAL


def test_flashinfers_large_blocks_are_cut(tmp_path):
    engine = planned_engine(
        tmp_path, "p", about={"attention-backend": "FLASHINFER"}, block_size=128
    )

    assert (engine.kernel_tokens, engine.parts) == (64, 2)
    assert any("Blackwell" in line for line in engine.assumed)


def test_a_release_may_lack_its_last_zero(tmp_path):
    assert planned_engine(tmp_path, "p", about={"release": 0.32}).facts.release == "0.32.0"


def test_a_size_that_no_kernel_takes_is_refused(tmp_path):
    with pytest.raises(BadOptions, match="takes no blocks of 24 tokens"):
        planned_engine(tmp_path, "p", block_size=24)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"about": {"release": "0.31.0"}}, "vLLM's release: 0.31.0 and 0.32.0"),
        ({"about": {"attention-backend": "TRITON_ATTN"}}, "TRITON_ATTN and FLASH_ATTN"),
        ({"dtype": "float16"}, "the model's data type"),
    ],
)
def test_another_hash_is_refused(tmp_path, changes, says):
    for found in verdicts(_pair(tmp_path, changes, {"env": {"ENABLE_KVPATCH": "true"}})):
        assert found.outcome is Outcome.REFUSED and says in found.reason
