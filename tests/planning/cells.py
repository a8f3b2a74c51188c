"""A cell of the lab's table as arguments of two engines, and what it says in a plan's words."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvpatch.tools.planning.arguments import EngineArguments
from kvpatch.tools.planning.engine import PlannedEngine, Role, engine_of
from kvpatch.tools.planning.pair import Outcome, Pair, Request
from tests.lab.case import Case, EngineSpec
from tests.lab.case import Outcome as Played
from tests.lab.releases import tells_blocks

BACKENDS = {
    "flash": "FLASH_ATTN",
    "flashinfer": "FLASHINFER",
    "cpu": "CPU_ATTN",
    "mla": "TRITON_MLA",
    "triton": "TRITON_ATTN",
}

#: What a lab run is called that came to a plan's outcome. On releases <= 0.11.0 the lab cannot make
#: the cache of a CPU, which no engine there registers; it says failed.
PLAYED: dict[Outcome, tuple[Played, ...]] = {
    Outcome.IDENTICAL: ("identical",),
    Outcome.REFUSED: ("refused",),
    Outcome.REFUSED_AT_START: ("refused", "failed"),
    Outcome.NOT_TOLD: ("failed",),
    Outcome.CRASH: ("failed",),
    Outcome.WRONG: ("corrupt",),
}


def pair_of(case: Case, release: str, folder: Path) -> Pair:
    """The two engines of a case."""
    return Pair(
        _engine("P", case.prefill, release, folder), _engine("D", case.decode, release, folder)
    )


def request_of(case: Case) -> Request:
    """The run's own."""
    return Request(case.prompt_tokens, min(case.prefix_hit_tokens, case.prompt_tokens))


def requests_of(case: Case, release: str) -> tuple[Request, ...]:
    """Those of the run, stock: the one that goes before, where the lab has it, and its own."""
    if tells_blocks(release):
        return (request_of(case),)
    return (Request(case.behind_another().tokens_before), request_of(case))


@cache
def _engine(role: Role, spec: EngineSpec, release: str, folder: Path) -> PlannedEngine:
    dtype = {"fp8": "bfloat16"}.get(spec.dtype, spec.dtype)
    arguments = EngineArguments(
        source=f"{role}.yaml",
        options={
            "model": "lab",
            "block_size": spec.block_tokens,
            "tensor_parallel_size": spec.tp_size,
            "dtype": dtype,
            "kv_cache_dtype": "fp8" if spec.dtype == "fp8" else "auto",
            "mamba_cache_dtype": spec.state_dtype or "auto",
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_buffer_device": "cpu" if spec.family == "cpu" else "cuda",
            },
        },
        about={
            "release": release,
            "platform": "cpu" if spec.family == "cpu" else "cuda",
            "attention-backend": BACKENDS[spec.family],
            "amx": spec.amx,
            # The lab's tensors have whole blocks, which 0.11.1 and 0.11.2 would cut.
            "kernel-block-size": spec.block_tokens // spec.parts,
        },
        environment={
            "VLLM_KV_CACHE_LAYOUT": spec.layout,
            "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
            **({"ENABLE_KVPATCH": "true"} if spec.patched else {}),
            **dict(spec.settings),
        },
    )
    return engine_of(role, arguments, _config(spec, folder))


def _config(spec: EngineSpec, folder: Path) -> Path:
    """As the lab's model says it (tests/lab/release.py)."""
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": spec.layers,
        "num_attention_heads": max(8, spec.kv_heads),
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "torch_dtype": "bfloat16",
    }
    if spec.family == "mla":
        rope = spec.head_dim // 4
        content |= {"architectures": ["DeepseekV2ForCausalLM"]}
        content |= {"kv_lora_rank": spec.head_dim - rope, "qk_rope_head_dim": rope}
    if any(spec.window_tokens):
        windows = [spec.window_of(layer) for layer in range(spec.layers)]
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        content |= {"layer_types": kinds, "sliding_window": max(windows)}
    if spec.has_state:  # heads of 8 channels, states of 4 (tests/lab/states.py)
        content |= {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["attention", "mamba"] * (spec.layers // 2),
            "mamba_n_heads": spec.states.heads,
            "mamba_d_head": spec.states.inner[0],
            "mamba_d_state": spec.states.inner[1],
            "mamba_n_groups": spec.states.groups,
            "mamba_d_conv": 4,
        }
    text = json.dumps(content)
    path = folder / f"{abs(hash(text))}.json"
    if not path.exists():
        path.write_text(text)
    return path
