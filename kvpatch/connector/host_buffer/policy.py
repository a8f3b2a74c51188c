"""Whether KV goes through a buffer in host memory, and how many blocks that one holds.

P's and D's scheduler and their workers decide for themselves, in processes of their
own, from the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import HostBufferRefused

#: Row 0 is for vLLM's null block, whose number is 0 in every table of blocks.
NULL_ROWS = 1


def is_wanted(
    mode: str, device_type: str, buffer_device: str, known_devices: frozenset[str]
) -> bool:
    """Whether this engine's KV goes through a host buffer.

    Args:
        mode: ``auto``, ``always`` or ``never``.
        device_type: the platform's, as torch names it.
        buffer_device: ``kv_buffer_device`` of the transfer configuration.
        known_devices: the device types that the release registers with NIXL, or has a
            host buffer of its own for.

    Raises:
        HostBufferRefused: it is forbidden where nothing else is possible.
    """
    if mode == "always":
        return True
    if device_type == "cpu":
        return False  # its caches are host memory
    asked = buffer_device == "cpu"
    if not asked and device_type in known_devices:
        return False
    if mode == "never":
        reason = (
            "kv_buffer_device is cpu"
            if asked
            else f"this vLLM registers {', '.join(sorted(known_devices))} with NIXL"
        )
        raise HostBufferRefused(
            f"KVPATCH_HOST_BUFFER=never, and the device is {device_type} where {reason}: set it to "
            "auto, or kv_buffer_device to a device whose memory can be registered"
        )
    return True


def is_wanted_here(vllm_config: Any, supported: Mapping[str, Any] | None) -> bool:
    """As :func:`is_wanted`, for this process's platform.

    Args:
        supported: the release's own table of devices; None where it has none (0.10.0).

    Raises:
        HostBufferRefused: it is forbidden where it is needed, or not possible here.
    """
    from vllm.platforms import current_platform

    wanted = is_wanted(
        settings.host_buffer(),
        str(current_platform.device_type),
        # No choice in 0.10.0, which registers everything as CUDA's memory.
        getattr(vllm_config.kv_transfer_config, "kv_buffer_device", "cuda") or "cuda",
        frozenset(("cuda",) if supported is None else supported),
    )
    if wanted:
        refuse_shares(vllm_config.parallel_config)
    return wanted


#: Ranks that hold other tokens or layers than the scheduler's own count of blocks tells.
_SHARES = (
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "pipeline_parallel_size",
)


def refuse_shares(parallel_config: Any) -> None:
    """Refuses ranks whose blocks are not alike.

    Raises:
        HostBufferRefused: there are some.
    """
    for name in _SHARES:
        size = getattr(parallel_config, name, 1)  # some came with later releases
        if size > 1:
            raise HostBufferRefused(
                f"{name} is {size}, and blocks go through a host buffer where all ranks have the "
                "same tokens and layers: use 1, or KVPATCH_HOST_BUFFER=never"
            )


def rows_in(budget_bytes: int, block_bytes: int, blocks: int) -> int:
    """How many blocks the buffer holds, the null block's row included.

    Args:
        budget_bytes: what the user allows.
        block_bytes: of one block over all tensors of a worker.
        blocks: that the device's cache has; more would never be in use.

    Raises:
        HostBufferRefused: not even one.
    """
    rows = min(budget_bytes // block_bytes, blocks)
    if rows <= NULL_ROWS:
        least = block_bytes * (NULL_ROWS + 1)
        raise HostBufferRefused(
            f"a host buffer of {budget_bytes} bytes holds no block: one takes {block_bytes} bytes, "
            f"and vLLM's null block as many; set KVPATCH_HOST_BUFFER_BYTES to {least} or more"
        )
    return rows


def block_bytes_of(plan: Any) -> int:
    """Bytes of one block over all tensors of a worker, from the scheduler's plan.

    <= 0.28 each tensor of the plan is memory of its own. From 0.29 on they are ranges of
    one allocation, which each of them states.
    """
    tensors = [t for t in plan.kv_cache_tensors if not getattr(t, "host_resident", False)]
    sizes = [int(tensor.size) for tensor in tensors]
    total = max(sizes) if hasattr(tensors[0], "layer_stride") else sum(sizes)
    return total // int(plan.num_blocks)
