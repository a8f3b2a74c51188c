"""The models of the pairs beside the tiny Llama: windows, recurrent state, latents, real widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpatch.tools.verify.model import GROUPED_HEADS, SIZES, make_tiny_llama, write

WINDOW_TOKENS = 40
"""What a sliding-window layer attends to: less than most prompts, and no multiple of a block."""


def make_tiny_window_llama(folder: Path) -> Path:
    """A Llama in which sliding-window layers alternate with full ones, so that vLLM's allocator
    makes several cache groups of it."""

    def build(vocabulary: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        kinds = ["sliding_attention", "full_attention"] * 2
        # vLLM reads both from a Llama's configuration; transformers' own Llama ignores them.
        config = LlamaConfig(
            vocab_size=vocabulary, layer_types=kinds, sliding_window=WINDOW_TOKENS, **GROUPED_HEADS
        )
        return LlamaForCausalLM(config)

    return write(folder, build)


def make_wide_llama(folder: Path) -> Path:
    """A Llama of 16 layers with 8 heads of 128 channels, about 400 MB of bfloat16 on a GPU.

    kvcached reserves virtual memory for as much as the device has. Blocks of the tiny model would
    be millions, and a connector describes each of them.
    """

    def build(vocabulary: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            **SIZES,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            # Four times the rows of the tiny one to add up: attention is as sharp with half.
            "initializer_range": 0.1,
            "max_position_embeddings": 8192,
        }
        config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=8, head_dim=128, **sizes)
        return LlamaForCausalLM(config)

    return write(folder, build)


def make_much_kv_llama(folder: Path) -> Path:
    """A Llama of 16 small layers with 8 heads of 128 channels: 128 KiB of KV a token in float32."""

    def build(vocabulary: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {**SIZES, "num_hidden_layers": 16}
        config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=8, head_dim=128, **sizes)
        return LlamaForCausalLM(config)

    return write(folder, build)


def make_tiny_mla(folder: Path) -> Path:
    """A DeepSeek-V2 without experts: one latent of 512 + 64 channels, the one width that vLLM's
    CPU backend has a kernel for.

    For ``kvpatch verify --model``. Not in the table of heterogeneous pairs, because that backend
    has blocks of 16 tokens whatever it is asked for.
    """

    def build(vocabulary: int) -> Any:
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        config = DeepseekV2Config(
            vocab_size=vocabulary,
            num_key_value_heads=8,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            n_routed_experts=4,  # of layers behind the dense ones: of none
            first_k_dense_replace=SIZES["num_hidden_layers"],
            **SIZES,
        )
        return DeepseekV2ForCausalLM(config)

    return write(folder, build)


def make_tiny_hybrid(folder: Path) -> Path:
    """A Granite in which Mamba2 layers alternate with attention.

    A state takes 38 KiB in float32, for which vLLM makes blocks of at least 64 tokens.
    """

    def build(vocabulary: int) -> Any:
        from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

        config = GraniteMoeHybridConfig(
            vocab_size=vocabulary,
            num_key_value_heads=4,
            layer_types=["mamba", "attention"] * 2,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=1024,  # vLLM's CPU backend takes a prompt for one chunk
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=SIZES["intermediate_size"],
            position_embedding_type="nope",
            attention_multiplier=1 / 16,
            **SIZES,
        )
        return GraniteMoeHybridForCausalLM(config)

    return write(folder, build)


MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "llama": make_tiny_llama,
    "window": make_tiny_window_llama,
    "mla": make_tiny_mla,
    "wide": make_wide_llama,
    "much-kv": make_much_kv_llama,
    "hybrid": make_tiny_hybrid,
}
"""Every model by its short name."""
