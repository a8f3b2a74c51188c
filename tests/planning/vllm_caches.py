"""Prints, as JSON, the caches that the installed vLLM makes of some models, without weights.

usage: python -m tests.planning.vllm_caches MODELS.json FOLDER

Each entry of the file is the config.json of an architecture. Of each layer that has a cache it says
what kind it is, KV heads, the width of one, and its window; of a latent one head of all its width;
of a state its shapes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_SSM_CONV_STATE_LAYOUT="DS")
#: Groups of ranks for experts are made with the first model: it has some.
_FIRST = "MixtralForCausalLM"


def main(models: Path, folder: Path) -> None:
    """Builds each model on the meta device."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.utils.torch_utils import set_default_torch_dtype

    # It looks at each class in a process of its own, which imports vLLM anew.
    registry._run_in_subprocess = lambda looked_at: looked_at()
    configs: dict[str, dict[str, Any]] = json.loads(models.read_text(encoding="utf-8"))
    found = {}
    for name in sorted(configs, key=lambda name: name != _FIRST):
        config = _engine_config(folder / name, configs[name])
        with set_current_vllm_config(config):
            if not found:
                init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            dtype = config.model_config.dtype
            with set_default_torch_dtype(dtype), torch.device("meta"):
                initialize_model(vllm_config=config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            found[name] = [_said(one.get_kv_cache_spec(config)) for one in layers.values()]
    print(json.dumps(found))


def _engine_config(folder: Path, content: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    transfer: Any = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
    }
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        kv_transfer_config=transfer,
    )
    return arguments.create_engine_config()


def _said(spec: Any) -> list[Any]:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return [kind, [list(shape) for shape in spec.shapes]]
    return [kind, spec.num_kv_heads, spec.head_size, getattr(spec, "sliding_window", None)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
