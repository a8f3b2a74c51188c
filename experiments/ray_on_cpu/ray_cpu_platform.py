"""vLLM's CPU platform, on which its Ray executors can run: as it comes they cannot, in any release.

They ask a platform what Ray calls its devices, and the CPU's answer is nothing. Here it is "GPU",
and raylets are told that they have such (``num_gpus``), which Ray does not look for. Nothing else
of vLLM is changed: executors, actors, scheduler, workers and connector are the release's own.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    """Called in every process of vLLM; where the platform's class is."""
    return "ray_cpu_platform.RayCpuPlatform"


class RayCpuPlatform(CpuPlatform):
    """The CPU, as Ray's executors would have it."""

    ray_device_key = "GPU"
