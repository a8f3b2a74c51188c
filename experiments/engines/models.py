"""The models of the pairs beside the tiny Llama: windows, recurrent state, latents, real widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvpatch.tools.verify.model import GROUPED_HEADS, SIZES, make_tiny_llama, write

WINDOW_TOKENS = 40
"""What a sliding-window layer attends to: less than most prompts, and no multiple of a block."""


def _make(folder: Path, kind: str, sizes: Mapping[str, Any]) -> Path:
    def build(vocabulary: int) -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, **sizes)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return write(folder, build)


make_tiny_window_llama = partial(
    _make,
    kind="Llama",
    # vLLM reads both from a Llama's configuration; transformers' own Llama ignores them.
    sizes={
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW_TOKENS,
        **GROUPED_HEADS,
    },
)
"""A Llama in which sliding-window layers alternate with full ones, so that vLLM's allocator makes
several cache groups of it."""

make_wide_llama = partial(
    _make,
    kind="Llama",
    sizes={
        **SIZES,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        # Four times the rows of the tiny one to add up: attention is as sharp with half.
        "initializer_range": 0.1,
        "max_position_embeddings": 8192,
    },
)
"""A Llama of 16 layers with 8 heads of 128 channels, about 400 MB of bfloat16 on a GPU.

kvcached reserves virtual memory for as much as the device has. Blocks of the tiny model would be
millions, and a connector describes each of them.
"""

make_much_kv_llama = partial(
    _make,
    kind="Llama",
    sizes={**SIZES, "num_hidden_layers": 16, "num_key_value_heads": 8, "head_dim": 128},
)
"""A Llama of 16 small layers with 8 heads of 128 channels: 128 KiB of KV a token in float32."""

make_tiny_hybrid = partial(
    _make,
    kind="GraniteMoeHybrid",
    sizes={
        "num_key_value_heads": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 1024,  # vLLM's CPU backend takes a prompt for one chunk
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": SIZES["intermediate_size"],
        "position_embedding_type": "nope",
        "attention_multiplier": 1 / 16,
        **SIZES,
    },
)
"""A Granite in which Mamba2 layers alternate with attention.

A state takes 38 KiB in float32, for which vLLM makes blocks of at least 64 tokens.
"""

MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "llama": make_tiny_llama,
    "window": make_tiny_window_llama,
    "wide": make_wide_llama,
    "much-kv": make_much_kv_llama,
    "hybrid": make_tiny_hybrid,
}
"""Every model by its short name."""
