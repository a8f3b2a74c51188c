"""The decision whether KV goes through a buffer in host memory, and how many blocks it holds.

P's and D's scheduler and their workers decide for themselves, in processes of their
own, from the same facts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.releases import ReleaseFacts

#: The first host block is for vLLM's null block, whose number is 0 in every table of blocks.
NULL_BLOCKS = 1
#: The device type whose tensors have no storage.
_STORAGELESS = "tpu"


def is_wanted(
    mode: str, device_type: str, buffer_device: str, memories: Mapping[str, Sequence[str]]
) -> bool:
    """True if this engine's KV goes through a host buffer of kvpatch's.

    The release's own mirror stays where it has one that works: it serves what kvpatch's buffer
    refuses.

    Args:
        mode: ``auto``, ``always`` or ``never``.
        device_type: the platform's, as torch names it.
        buffer_device: ``kv_buffer_device`` of the transfer configuration.
        memories: by device type, the devices whose memory the release registers with NIXL for it;
            the CPU's is its mirror.

    Raises:
        RegistrationRefused: it is forbidden where nothing else is possible.
    """
    if mode == "always":
        return True
    # A mirror of tensors that have no storage states another layout than it has.
    own = () if device_type == _STORAGELESS else memories.get(device_type, ())
    if device_type == "cpu":  # its caches are host memory
        return False
    asked = buffer_device == "cpu"
    if "cpu" in own if asked else own:
        return False
    if mode == "never":
        reason = (
            "kv_buffer_device is cpu"
            if asked
            else f"this vLLM registers {', '.join(sorted(memories))} with NIXL"
        )
        raise RegistrationRefused(
            f"KVPATCH_HOST_BUFFER=never, and the device is {device_type} where {reason}",
            "set it to auto, or kv_buffer_device to a device whose memory can be registered",
        )
    return True


def supported_devices(facts: ReleaseFacts) -> dict[str, tuple[str, ...]] | None:
    """The release's own table of devices, by the memory they can use; None in 0.10.0."""
    if not facts.device_table:
        return None
    found: dict[str, tuple[str, ...]] = vars(sys.modules[facts.worker.module])[facts.device_table]
    return found


def is_wanted_here(vllm_config: Any, facts: ReleaseFacts) -> bool:
    """Decides :func:`is_wanted` for this platform; refuses ranks that share out blocks."""
    from vllm.platforms import current_platform

    device, memories = str(current_platform.device_type), supported_devices(facts)
    asked = vllm_config.kv_transfer_config.kv_buffer_device or "cuda"
    if memories is None:  # 0.10.0 registers everything as CUDA's memory, whatever is asked for
        asked, memories = "cuda", {"cuda": ("cuda",)}
    wanted = is_wanted(settings.host_buffer(), device, asked, memories)
    if wanted:
        refuse_shares(vllm_config.parallel_config, facts)
    return wanted


def refuse_shares(parallel_config: Any, facts: ReleaseFacts) -> None:
    """Refuses ranks that hold other tokens or layers than the scheduler's count of blocks tells."""
    for name in (*facts.context_sizes, "pipeline_parallel_size"):
        size = getattr(parallel_config, name)
        if size > 1:
            raise RegistrationRefused(
                f"{name} is {size}, and blocks go through a host buffer where all ranks have the "
                "same tokens and layers",
                "use 1, or KVPATCH_HOST_BUFFER=never",
            )


def host_blocks_in(budget_bytes: int, block_bytes: int, blocks: int) -> int:
    """Returns how many blocks the buffer holds, the null block included.

    Args:
        budget_bytes: what the user allows.
        block_bytes: of one block over all tensors of a worker.
        blocks: that the device's cache has; more would never be in use.

    Raises:
        RegistrationRefused: not even one.
    """
    host_blocks = min(budget_bytes // block_bytes, blocks)
    if host_blocks <= NULL_BLOCKS:
        least = block_bytes * (NULL_BLOCKS + 1)
        raise RegistrationRefused(
            f"a host buffer of {budget_bytes} bytes holds no block: one takes {block_bytes} "
            "bytes, and vLLM's null block as many",
            f"set KVPATCH_HOST_BUFFER_BYTES to {least} or more",
        )
    return host_blocks


def block_bytes_of(plan: Any, facts: ReleaseFacts) -> int:
    """Returns the bytes of one block over all tensors of a worker, from the scheduler's plan.

    <= 0.28 each tensor of the plan is memory of its own. From 0.29 on they are ranges of
    one allocation, which each of them states.
    """
    tensors = plan.kv_cache_tensors
    sizes = [int(t.size) for t in tensors if not (facts.names_regions and t.host_resident)]
    total = max(sizes) if facts.plans_transfers else sum(sizes)
    return total // int(plan.num_blocks)


def is_to_be_read(request: Any) -> bool:
    """True if a decode engine will read this request's blocks."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))
