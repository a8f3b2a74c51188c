"""``kvpatch plan`` as a user meets it: two files that do not fit, one change, they serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .walk import extra, plan, transfer, write_side

pytestmark = pytest.mark.patching

ROOT = Path(__file__).parents[2]


def _json(*arguments: object) -> tuple[int, dict]:
    status, output = plan(*arguments, "--json")
    return status, json.loads(output)


def test_a_pair_that_does_not_fit_serves_after_one_change(tmp_path):
    p, d = (write_side(tmp_path, role) for role in "pd")

    status, before = _json(p, d)
    assert status == 1
    assert before["configured"]["outcome"] == "refused at the first request"
    assert before["kvpatch"]["outcome"] == "identical"
    assert "up to 256 MiB more memory" in before["kvpatch"]["way"]
    assert before["changes"][0].startswith("D: set ENABLE_KVPATCH=true")
    assert before["preflight"] == before["assumed"] == []

    d = write_side(tmp_path, "d", env={"ENABLE_KVPATCH": "true"})
    status, after = _json(p, d)
    assert status == 0
    assert after["configured"]["outcome"] == "identical"
    assert after["changes"] == []

    d = write_side(
        tmp_path, "d", env={"ENABLE_KVPATCH": "true", "KVPATCH_STAGING_BYTES": str(96 * 2**20)}
    )
    assert "up to 96 MiB more memory" in _json(p, d)[1]["kvpatch"]["way"]


def test_the_change_that_needs_no_kvpatch_serves_too(tmp_path):
    p, d = write_side(tmp_path, "p"), write_side(tmp_path, "d", block_size=128)

    status, found = _json(p, d)

    assert (status, found["kvpatch"]["way"]) == (0, "vLLM's own")


def test_wrong_tokens_are_told_before_they_are_served(tmp_path):
    """Smaller blocks at P, on a release that mixes their heads."""
    about = {"release": "0.31.0"}
    p = write_side(tmp_path, "p", block_size=32, about=about)
    d = write_side(tmp_path, "d", block_size=128, about=about)

    status, output = plan(p, d)

    assert status == 1
    assert "wrong tokens, HTTP 200" in output
    assert "This pair does not serve as it is." in output
    assert "change: D: set ENABLE_KVPATCH=true" in output


def test_prefix_hits_are_told_apart(tmp_path):
    """From 0.32 on smaller blocks are joined, and paired wrongly behind a prefix hit."""
    p = write_side(tmp_path, "p", block_size=32)
    d = write_side(tmp_path, "d", block_size=128)

    _, found = _json(p, d)

    assert found["stock"]["outcome"] == "wrong tokens, HTTP 200"
    assert "prefix hit" in found["stock"]["reason"]

    d = write_side(tmp_path, "d", block_size=128, no_enable_prefix_caching=True)
    status, output = plan(p, d)
    assert status == 2 and "rightly for some prompts only: use one --block-size" in output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"about": {"release": None}}, "which release of vLLM is it?"),
        ({"about": {"release": "0.9.2"}}, "is not a release that kvpatch knows"),
        ({"about": {"relaese": "0.32.0"}}, "did you mean release?"),
        ({"block_size": "many"}, "expected a whole number"),
        ({"model": "org/none-such"}, "--model-config"),
        ({"kv_transfer_config": "{"}, "is no JSON"),
        ({"pipeline_parallel_size": 2}, "not planned for: --pipeline-parallel-size above 1"),
        (
            {"about": {"attention-backend": "NOPE"}},
            "not planned for: keys and values of the attention backend NOPE",
        ),
        ({"about": {"platform": "tpu"}}, "not planned for: platform tpu"),
        ({"env": {"ENABLE_KVCACHED": "true"}}, "not planned for: the memory of kvcached"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "fp8_per_token_head of FLASH_ATTN"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2 of FLASH_ATTN: write the attention-backend"),
        ({"attention_backend": "FLASHINFER"}, "backends FLASHINFER and FLASH_ATTN"),
        (
            {"about": {"release": "0.28.0"}, "env": {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}},
            "KV cache layout LBHNC: use HND or NHD",
        ),
        (transfer(kv_connector_extra_config=["UCX"]), "kv_connector_extra_config is ['UCX']"),
        ({"tensor_paralel_size": 2}, "did you mean tensor-parallel-size?): write that"),
        ({"tp": 2}, "did you mean tensor-parallel-size?"),
        ({"no_such_thing": True}, "not planned for: --no-such-thing"),
        ({"calculate_kv_scales": True}, "they are not sent"),
        ({"revision": "abc"}, "does not compare: use one --revision on both sides"),
        ({"env": {"VLLM_SOMETHING": "1"}}, "not planned for: VLLM_SOMETHING"),
        ({"env": {"KVPATCH_TRANSFR": "direct"}}, "did you mean KVPATCH_TRANSFER?"),
        ({"env": {"KVPATCH_ACCEPT": "vllm_version"}}, "not planned for: KVPATCH_ACCEPT: leave"),
        ({"about": {"release": "0.25.1"}}, "vLLM 0.25.1, which is before 0.26.0"),
        ({"kv_transfer_config": '{"kv_buffer_device": "cpu"}'}, "a buffer in host memory"),
        ({"kv_transfer_config": '{"kv_connector": "MultiConnector"}'}, "write the NixlConnector"),
        (
            {"speculative_config": '{"method": "eagle"}', "about": {"release": "0.27.0"}},
            "which vLLM 0.27.0 does not compare",
        ),
    ],
)
def test_what_cannot_be_said_is_status_2_with_a_sentence(tmp_path, changes, says):
    p, d = write_side(tmp_path, "p"), write_side(tmp_path, "d", **changes)

    status, output = plan(p, d)

    assert status == 2
    assert says in output
    assert "Traceback" not in output


def test_what_is_of_no_matter_is_let_be(tmp_path):
    more = {"max_model_len": 4096, "no_enable_log_requests": True}
    env = {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "INFO", "ENABLE_KVPATCH": "true"}
    p, d = (write_side(tmp_path, role, env=env, **more) for role in "pd")

    assert plan(p, d)[0] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensor_parallel_size": 3}, "3 ranks cannot share 32 heads and 8 KV heads"),
        (transfer(kv_role="both"), "'both'"),
        (transfer(kv_rank=1, kv_ip="10.0.0.2"), "vLLM 0.32.0 has no kv_ip, kv_rank"),
        (transfer(kv_bufer_device="cuda"), "kv_bufer_device (did you mean kv_buffer_device?)"),
        (transfer(kv_load_failure_policy="retry"), "kv_load_failure_policy is none"),
        (extra(kv_lease_duration="300"), "kv_lease_duration is '300'"),
    ],
)
def test_an_engine_that_does_not_start_is_status_1(tmp_path, changes, says):
    p, d = write_side(tmp_path, "p"), write_side(tmp_path, "d", block_size=128, **changes)

    status, output = plan(p, d, "--json")

    assert status == 1
    assert says in output


def test_older_releases_take_the_rank_of_a_connector(tmp_path):
    more = transfer(kv_rank=1, kv_parallel_size=2)
    about = {"release": "0.31.0"}
    p, d = (write_side(tmp_path, role, block_size=64, about=about, **more) for role in "pd")

    assert plan(p, d)[0] == 0


def test_a_command_is_no_file_of_arguments(tmp_path):
    p, d = write_side(tmp_path, "p"), tmp_path / "d.yaml"
    d.write_text("VLLM_KV_CACHE_LAYOUT=HND vllm serve m \\\n  --block-size 128\n")

    status, output = plan(p, d)

    assert status == 2 and "expected lines such as" in output and "JSON" not in output


def test_a_file_that_is_no_yaml_is_status_2(tmp_path):
    p, d = write_side(tmp_path, "p"), tmp_path / "d.yaml"
    for content in ("a: [", "- 1", "\0"):
        d.write_text(content)
        assert plan(p, d)[0] == 2
    d.unlink()
    assert plan(p, d)[0] == 2


def test_the_section_may_stand_beside_the_file_that_vllm_takes(tmp_path):
    p, d = (write_side(tmp_path, role) for role in "pd")
    for path in (p, d):
        lines = path.read_text()
        section = lines[lines.index("kvpatch:") :]
        end = section.index("\nmodel:")
        path.write_text(lines.replace(section[:end], ""))
        beside = "\n".join(line[2:] for line in section[:end].splitlines()[1:])
        path.with_name(f"{path.stem}.kvpatch.yaml").write_text(beside)
        assert "kvpatch" not in path.read_text()

    assert _json(p, d)[1]["decode"].startswith("vLLM 0.32.0 on cuda, FLASH_ATTN")


def test_what_is_not_stated_is_assumed_aloud(tmp_path):
    bare = {"about": {"platform": None, "attention-backend": None}, "block_size": None}
    p, d = (write_side(tmp_path, role, **bare) for role in "pd")

    _, found = _json(p, d)

    for role in "PD":
        for what in ("CUDA device", "chooses FLASH_ATTN", "blocks of 16 tokens"):
            assert any(line.startswith(f"{role}: ") and what in line for line in found["assumed"])


_WITHOUT = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from kvpatch.tools.cli import app
app()
"""


def test_neither_vllm_nor_torch_is_imported(tmp_path):
    p, d = (write_side(tmp_path, role) for role in "pd")

    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT, "plan", str(p), str(d), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout)["kvpatch"]["outcome"] == "identical"


@pytest.mark.parametrize(
    ("variables", "status", "sentence"),
    [
        ({}, 0, ""),
        ({"PEER_KEYS": "tiles"}, 1, "P has another order"),
        ({"PEER_KEYS": "rows"}, 2, "write columns or tiles"),
        ({"PEER_BLOCK_SIZE": "64"}, 1, "declares blocks of"),
        ({"TRANSFER": "staged"}, 0, ""),
        ({"TRANSFER": "staged", "STAGING_BYTES": "1024"}, 1, "bytes of staging pool"),
    ],
)
def test_what_d_is_told_of_p(tmp_path, variables, status, sentence):
    """P's processor has no AMX, and no handshake says so."""
    about = {"platform": "cpu", "attention-backend": None}
    p = write_side(tmp_path, "p", about={**about, "amx": False})
    told = {"PEER_KEYS": "columns", **variables}
    env = {"ENABLE_KVPATCH": "true"} | {f"KVPATCH_{name}": value for name, value in told.items()}
    d = write_side(tmp_path, "d", about={**about, "amx": True}, env=env)

    found, output = plan(p, d)

    assert found == status, output
    assert sentence in " ".join(output.replace("│", " ").split())
