"""Describes the machine, and what NIXL and UCX find on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import torch

from experiments.gpu.rows import Rows, options_of

_AGENT = """
import torch
from nixl._api import nixl_agent, nixl_agent_config
{touch}
print(sorted(nixl_agent("look", nixl_agent_config(num_threads=1)).get_plugin_list()))
"""


def main() -> None:
    """Writes a row for the machine, and one for its transports."""
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
    touch = "torch.zeros(1, device='cuda')" if is_gpu else ""
    done = subprocess.run(
        [sys.executable, "-c", _AGENT.format(touch=touch)],
        env={**os.environ, "UCX_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "cuda" in line.lower()]
    rows.add("transports", plugins=done.stdout.splitlines()[-1:], of_cuda=said[:12])


if __name__ == "__main__":
    main()
