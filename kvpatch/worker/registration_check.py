"""The check that the blocks a worker has registered are where its tensors' blocks lie.

<= 0.28 a release computes a block's address from the bytes of its shape, and never asks the
tensor for its strides; what it has computed stands on the worker as it registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.core.proxies import ObjectProxy, replaced
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.tensor_facts import extent_bytes
from kvpatch.worker.registered_caches import LayerCache
from kvpatch.worker.release_worker import ReleaseWorker


@dataclass(frozen=True)
class _Region:
    address: int
    block_bytes: int


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
        """Runs the check, the first time that it is called."""
        check, self._self_check = self._self_check, None
        if check is not None:
            check()

    def prep_xfer_dlist(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return self.__wrapped__.prep_xfer_dlist(*args, **kwargs)


def _refuse_other_strides(release: ReleaseWorker, layers: Mapping[str, LayerCache]) -> None:
    # From 0.29 the release asks for strides; of its own host buffer it has made them.
    if release.has_own_mirror:
        _refuse_other_copies(release, layers)
    if release.has_own_mirror or release.facts.names_layouts:
        return
    regions = tuple(map(_Region, release.addresses, release.region_block_bytes))
    block_tokens = int(release.worker.block_size)
    # Of one allocation of all layers these releases make one region, and move its keys alone.
    # kvcached's halves are registered as regions of their own.
    has_halves = release.facts.cache_shape == "blocks first" and not release.worker.use_mla
    has_halves = has_halves and not settings.is_kvcached_enabled()
    if has_halves and int(release.worker.num_regions) <= len(regions):
        raise RegistrationRefused(
            "layers lie side by side in one allocation, of whose blocks this vLLM (0.23 to 0.25) "
            "moves the first half",
            "use vLLM 0.26 or later, or give each layer its own memory",
        )
    for name, cache in layers.items():
        for plane in cache.planes:
            # Of several groups' layers some may have blocks that are not cut, or of more tokens.
            parts = {1, max(1, plane.counts.block_tokens // block_tokens)}
            if not any(_lies_in(plane, region, number) for region in regions for number in parts):
                raise _refusal(name, plane, regions)


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


def _lies_in(plane: Plane, region: _Region, parts: int) -> bool:
    if plane.counts.blocks > 1 and plane.strides_bytes.block != region.block_bytes * parts:
        return False
    offset = plane.address - region.address
    extent = extent_bytes(plane.axes[1:], plane.item_bytes)
    return offset >= 0 and offset + extent <= region.block_bytes * parts


def _refusal(name: str, plane: Plane, regions: tuple[_Region, ...]) -> RegistrationRefused:
    found = sorted({region.block_bytes for region in regions})
    return RegistrationRefused(
        f"blocks of {name} lie {plane.strides_bytes.block} bytes apart, and this vLLM takes them "
        f"to lie {', '.join(map(str, found))} apart: it would move other bytes. Expected a tensor "
        "of the backend's own strides",
        "set ENABLE_KVCACHED=true in every process of the engine where kvcached has made it, and "
        "have another allocator give each layer its own memory",
    )
