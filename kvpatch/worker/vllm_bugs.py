"""The bugs of vLLM in caches that it lays out itself.

**Blocks of a wrong size** (0.11.1 and 0.11.2). A CPU backend's cache is [2, block, head, token,
channel]. The worker takes the third dimension from the end, its heads, for the tokens of a block.
It then cuts blocks that no kernel has cut, and states the number to its peers. Addresses and bytes
are right.

**Recurrent state between the layers of a block** (from 0.29, BLNHC and BLHNC). The release steps
from block to block of a state by the state's own page. But a block of all layers lies between the
two, so that it sends other layers' bytes, without an error. The step is right only where attention
of another group begins in the same place and is registered first, or is MLA (from 0.30 on), whose
step the release takes whatever was registered before.

**Recurrent state beside steps that are under way** (<= 0.25, vLLM #37285, #45357 and #48481). Under
asynchronous scheduling a step begins before the one before it is over. When P's bytes are there
already, a load's blocks are then zeroed, or a request that has ended writes to them (<= 0.23). A
CPU runs one step after the other.

**AMX tiles that the process may not use yet** (CPU, bfloat16, a processor with AMX; seen on
0.32.0). Linux lets a process use AMX only after it has asked. The CPU backend does not ask; PyTorch
does before its first large matrix product. A worker whose first request is a load has computed
none, so that its attention ends it with SIGILL.

**Strides that nobody asks for** (<= 0.28). A release computes a block's address from the bytes of
its shape. What it has computed stands on the worker as it registers the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.proxies import ObjectProxy, replaced
from kvpatch.geometry.cross_layer_blocks import in_order
from kvpatch.geometry.layout_strides import LAYERS_INSIDE_BLOCKS
from kvpatch.geometry.plane import Plane, extent_bytes
from kvpatch.worker.kv_cache_groups import transferred_groups
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import ReleaseWorker

_LOG = logging.getLogger("kvpatch.unlike_engines")
_LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")


def mend_block_size(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> bool:
    """Sets a worker's block size to that of the blocks that ids count: none of them is cut.

    Returns:
        True if the worker had taken heads for tokens; its peers may have, too.
    """
    worker = release.worker
    if not release.facts.topology_has_block_size or worker.backend_name != "CPU_ATTN":
        return False  # 0.12 asks the worker for its blocks
    planned = worker.vllm_config.cache_config.block_size
    if any(p.counts.block_tokens != planned for layer in layers.values() for p in layer.planes):
        return False
    worker.block_size, worker._physical_blocks_per_logical_kv_block = planned, 1
    return True


def may_use_amx() -> bool:
    """Asks Linux to let this process use AMX; True if it may. A second call changes nothing.

    vLLM's CPU backend uses AMX and does not ask for it.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)  # a private name: what a PyTorch has not asks none
    return ask is not None and bool(ask())


def ask_for_tiles() -> None:
    if not may_use_amx():
        _LOG.warning(
            "this process may not use AMX, with which vLLM computes attention here: it may end "
            "with SIGILL; use --dtype float32"
        )


def refuse_steps_under_way(release: ReleaseWorker) -> None:
    """Refuses a D whose steps may write to what it loads."""
    from vllm.platforms import current_platform

    facts, config = release.facts, release.worker.vllm_config
    if not facts.has_cache_groups or facts.spares_loaded_blocks:
        return
    is_ahead = config.scheduler_config.async_scheduling and config.kv_transfer_config.is_kv_consumer
    if not is_ahead or current_platform.device_type == "cpu":
        return
    if any(hasattr(release.spec_of(layer), "shapes") for layer in release.worker._layer_specs):
        raise RegistrationRefused(
            "this model has recurrent state, and under asynchronous scheduling a step that is "
            "under way writes to blocks that are loaded (vLLM #45357, #48481)",
            "use --no-async-scheduling, or vLLM 0.26 or later; a P alone may have kv_role "
            "kv_producer",
        )


def misread_states(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], attention: Collection[str]
) -> bool:
    """True if the release would look elsewhere for the state of a layer that is no attention."""
    if release.stated_layout not in LAYERS_INSIDE_BLOCKS:
        return False
    if release.worker._is_csa_linear:  # a kind of its own, by its strides
        return False
    specs = release.worker._layer_specs
    for name in kv_caches.keys() - frozenset(attention):
        cache, spec = kv_caches[name], specs.get(name)
        if type(spec).__name__ != "MambaSpec":
            continue
        if cache.stride(0) * cache.element_size() == int(spec.page_size_bytes):
            continue
        for order in (kv_caches, in_order(kv_caches)):  # 0.29's, and later ones'
            there = [one for one in order if kv_caches[one].data_ptr() == cache.data_ptr()]
            # A ring has no heads either, and is none of those.
            latent = (one for one in there if type(specs.get(one)).__name__ in _LATENT)
            owner = next(latent, there[0]) if release.facts.names_regions else there[0]
            if owner not in attention or not _is_region(release, kv_caches[owner][0]):
                return True
    return False


def _is_region(release: ReleaseWorker, page: Any) -> bool:
    """True if the release makes a region of a layer's page, and not of the row that it is in.

    0.29 compares strides, even that of a single head. It has rows of MLA in one piece.
    """
    if release.facts.names_regions:
        return bool(page.is_contiguous())
    sizes, strides = tuple(page.shape), tuple(page.stride())
    is_dense = len(sizes) == 3 and strides == (sizes[1] * sizes[2], sizes[2], 1)
    return is_dense and not release.worker.use_mla


@contextmanager
def strides_checked(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> Iterator[None]:
    """Refuses a registration, while inside, that computes other places than blocks have.

    It does so before a transfer is prepared: NIXL's handles of a worker that was never made outlive
    their agent, and end the process without a word.
    """
    check = partial(_refuse_other_strides, release, layers)
    checked = _CheckedFirst(release.worker.nixl_wrapper, check)
    with replaced(release.worker, nixl_wrapper=checked):
        yield
    checked.check()


class _CheckedFirst(ObjectProxy):
    """A NIXL agent that has something looked at before it prepares its first transfer."""

    def __init__(self, agent: Any, check: Callable[[], None]) -> None:
        super().__init__(agent)
        self._self_check: Callable[[], None] | None = check

    def check(self) -> None:
        check, self._self_check = self._self_check, None
        if check is not None:
            check()

    def prep_xfer_dlist(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return self.__wrapped__.prep_xfer_dlist(*args, **kwargs)


def _refuse_other_strides(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> None:
    worker, facts = release.worker, release.facts
    # From 0.29 the release asks for strides; of its own host buffer it has made them.
    if release.has_own_mirror:
        _refuse_copies_of_all_groups(release)
        _refuse_other_copies(release, layers)
    if release.has_own_mirror or facts.names_layouts or not layers:
        return
    regions = tuple(zip(release.addresses, release.region_block_bytes, strict=False))
    # Of one allocation of all layers these releases make one region, and move its keys alone.
    # kvcached's halves are registered as regions of their own.
    has_halves = facts.cache_shape == "blocks first" and not worker.use_mla
    has_halves = has_halves and not settings.is_kvcached_enabled()
    if has_halves and int(worker.num_regions) <= len(regions):
        raise RegistrationRefused(
            "layers lie side by side in one allocation, of whose blocks this vLLM (0.23 to 0.25) "
            "moves the first half",
            "use vLLM 0.26 or later, or give each layer its own memory",
        )
    for name, cache in layers.items():
        for plane in cache.planes:
            # Of several groups' layers some may have blocks that are not cut, or of more tokens.
            parts = {1, max(1, plane.counts.block_tokens // int(worker.block_size))}
            # The tokens of a whole plane say nothing: DeepSeek-V4's rows, which vLLM cuts.
            number, rest = divmod(int(worker.num_blocks), max(1, plane.counts.blocks))
            if plane.is_whole and not rest:
                parts.add(number)
            sizes = ((start, size * number) for start, size in regions for number in parts)
            if not any(_lies_in(plane, start, size) for start, size in sizes):
                found = ", ".join(map(str, sorted({size for _, size in regions})))
                raise RegistrationRefused(
                    f"blocks of {name} lie {plane.strides_bytes.block} bytes apart, and this vLLM "
                    f"takes them to lie {found} apart: it would move other bytes. Expected a "
                    "tensor of the backend's own strides",
                    "set ENABLE_KVCACHED=true in every process of the engine where kvcached has "
                    "made it, and have another allocator give each layer its own memory",
                )


def _refuse_copies_of_all_groups(release: ReleaseWorker) -> None:
    """Refuses a mirror of several cache groups, which have one memory on the device (from 0.30).

    D reads each group's blocks into the mirrors of its own layers, and copies them to the device
    out of the mirrors of all.
    """
    facts = release.facts
    if "region_group_ids" not in facts.agent_metadata:
        return
    groups = len(transferred_groups(release.worker.kv_cache_config, facts))
    if groups > 1:
        raise RegistrationRefused(
            f"this model has {groups} cache groups (sliding windows), and this vLLM's own host "
            "buffer copies what it loads for one over another's layers (from 0.30 on)",
            "set --disable-hybrid-kv-cache-manager on both sides, or (not in push mode) "
            "KVPATCH_HOST_BUFFER=always on both",
        )


def _refuse_other_copies(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> None:
    """Refuses tensors of which CUDA's and XPU's mirrors copy other blocks (<= 0.22).

    Their copies take the second dimension for that of blocks.
    """
    is_second = release.facts.cache_shape == "keys first"
    if not is_second or release.worker.device_type not in ("cuda", "xpu"):
        return
    for name, cache in layers.items():
        if cache.order.dimensions.index("block") != 1:
            raise RegistrationRefused(
                f"blocks of {name} are the first dimension of its tensor, and this vLLM's own "
                "host buffer copies by the second (<= 0.22)",
                "set KVPATCH_HOST_BUFFER=always, or use vLLM 0.23 or later",
            )


def _lies_in(plane: Plane, address: int, block_bytes: int) -> bool:
    if plane.counts.blocks > 1 and plane.strides_bytes.block != block_bytes:
        return False
    offset = plane.address - address
    return 0 <= offset <= block_bytes - extent_bytes(plane.axes[1:], plane.item_bytes)
