"""Describes the machine."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

from experiments.gpu.rows import Rows, options_of


def main() -> None:
    """Writes a row for the machine."""
    options = options_of(__doc__)
    rows = Rows(options.json)
    is_gpu = options.device == "cuda"
    driver = ""
    if is_gpu:
        asked = [
            "nvidia-smi",
            "--query-gpu=driver_version,mig.mode.current",
            "--format=csv,noheader",
        ]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    rows.add(
        "machine",
        name=torch.cuda.get_device_name() if is_gpu else platform.processor(),
        driver=driver,
        torch=torch.__version__,
        python=platform.python_version(),
        cores=os.cpu_count(),
    )


if __name__ == "__main__":
    main()
