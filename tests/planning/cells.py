"""A cell of the lab's table as arguments of two engines, and what it says in a plan's words."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvpatch.peer.engine_description import FULL, STATE, Caches, Layer
from kvpatch.tools.planning.arguments import Description, EngineArguments
from kvpatch.tools.planning.engine import Pair, PlannedEngine, Role, engine_of
from kvpatch.tools.planning.verdicts import Outcome
from tests.lab.case import Case, EngineSpec
from tests.lab.case import Outcome as Played

BACKENDS = {
    "flash": "FLASH_ATTN",
    "flashinfer": "FLASHINFER",
    "cpu": "CPU_ATTN",
    "mla": "TRITON_MLA",
    "triton": "TRITON_ATTN",
}

#: The outcomes of a lab run that a plan's outcome stands for. On releases <= 0.11.0 the lab cannot
#: make the cache of a CPU, which no engine there registers; it says failed.
PLAYED: dict[Outcome, tuple[Played, ...]] = {
    Outcome.IDENTICAL: ("identical",),
    Outcome.REFUSED: ("refused", "failed"),
    Outcome.REFUSED_AT_START: ("refused", "failed"),
    Outcome.WRONG: ("corrupt",),
    Outcome.UNKNOWN: ("identical", "corrupt", "refused", "failed"),
}


def pair_of(case: Case, release: str, folder: Path, device: str = "") -> Pair:
    """The two engines of a case.

    Args:
        device: where both run; empty for the one that their backends are made for.
    """
    sides: tuple[tuple[Role, EngineSpec], ...] = (("P", case.prefill), ("D", case.decode))
    return Pair(*(_engine(role, spec, release, folder, device) for role, spec in sides))


@cache
def _engine(role: Role, spec: EngineSpec, release: str, folder: Path, device: str) -> PlannedEngine:
    device = device or ("cpu" if spec.family == "cpu" else "cuda")
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
                "kv_buffer_device": device,
            },
        },
        about={
            "release": release,
            "platform": device,
            "attention-backend": BACKENDS[spec.family],
            "amx": spec.amx,
        },
        environment={
            "VLLM_KV_CACHE_LAYOUT": spec.layout,
            "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
            **({"ENABLE_KVPATCH": "true"} if spec.patched else {}),
            **dict(spec.settings),
        },
        described=Description(release, state_caches(spec)) if spec.has_state else None,
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
    text = json.dumps(content)
    path = folder / f"{abs(hash(text))}.json"
    if not path.exists():
        path.write_text(text)
    return path


def state_caches(spec: EngineSpec) -> Caches:
    """Mamba2's, as ``describe`` has them: 8 channels a head, states of 4 (tests/lab/states.py)."""
    width, size = spec.states.inner
    dtype = {"fp8": "bfloat16"}.get(spec.dtype, spec.dtype)
    state = spec.state_dtype or dtype
    conv_bytes = 3 * (4 if state == "float32" else 2)
    of_groups = (spec.states.groups * size, spec.states.groups == 1)
    parts = (
        (conv_bytes, ((spec.states.heads * width, False), of_groups, of_groups)),
        (width * size * conv_bytes // 3, ((spec.states.heads, False),)),
    )
    heads = max(1, spec.kv_heads // spec.tp_size)
    every = [
        Layer(f"l.{n}", STATE, "MAMBA2", spec.block_tokens, 0, (state, state), parts=parts)
        if n % 2
        else Layer(
            *(f"l.{n}", FULL, BACKENDS[spec.family], spec.block_tokens, 0, (dtype,)),
            kv_heads=heads, head_dim=spec.head_dim, value_dim=spec.head_dim,
        )
        for n in range(spec.layers)
    ]  # fmt: skip
    names = [one.name for one in every]
    return Caches(
        *(spec.block_tokens, spec.block_tokens // spec.parts, spec.layout),
        *(max(8, spec.kv_heads), spec.kv_heads, dtype, dtype, tuple(every)),
        (tuple(names[::2]), tuple(names[1::2])),
    )
