"""A platform of somebody else's, which vLLM finds by its entry point: a stand-in for a real one.

It computes on the CPU, with the CPU platform's worker and kernels, and calls its device by a name
that vLLM and its connector have never heard of. Its runner is the CPU's: what that hands over to
copy with is vLLM's own operation, which this platform has no copies for.
"""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform

DEVICE_TYPE = "strange"


def register() -> str:
    # So that torch takes the name for a device's; nothing is ever put on one.
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    return "strange_platform.StrangePlatform"


class StrangePlatform(CpuPlatform):
    """The CPU under another name."""

    device_name = DEVICE_TYPE
    device_type = DEVICE_TYPE

    @classmethod
    def check_and_update_config(cls, vllm_config: object) -> None:
        """The CPU platform's, which asks for a CPU."""
        vllm_config.device_config.device_type = "cpu"  # type: ignore[attr-defined]
        vllm_config.device_config.device = torch.device("cpu")  # type: ignore[attr-defined]
        super().check_and_update_config(vllm_config)
