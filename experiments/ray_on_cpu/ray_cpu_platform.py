"""vLLM's CPU platform, which its Ray executors may run on: no release lets them.

They ask a platform what Ray calls its devices, and the CPU's answer is nothing. Raylets say that
they have GPUs (``--num-gpus``), which Ray does not look for.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    """Called in every process of vLLM; where the platform's class is."""
    return "ray_cpu_platform.RayCpuPlatform"


class RayCpuPlatform(CpuPlatform):
    """The CPU, as Ray's executors would have it."""

    ray_device_key = "GPU"
