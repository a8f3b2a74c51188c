"""Which planes of a worker's cache hold what a witness can compare; or why none do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpatch.connector.inspected_caches import Cache, read_cache
from kvpatch.connector.local.cache_kinds import LATENT, ROWS
from kvpatch.connector.local.kv_cache_groups import Group, transferred_groups
from kvpatch.connector.local.registered_caches import LayerCache
from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.connector.speculative_decoding import reserves_slots
from kvpatch.core.errors import WitnessRefused
from kvpatch.geometry.layer_names import place_in_model
from kvpatch.geometry.plane import Plane
from kvpatch.geometry.slot_gather import Table

if TYPE_CHECKING:
    import torch

#: How a cache whose tensors hold bytes holds numbers, by vLLM's name of the data type.
_FP8 = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True)
class WitnessedPlanes:
    """Of one worker.

    Attributes:
        planes: in the order of the model's layers.
        tables: by plane the block table of its cache group.
        first_layer: what the model computes from the token alone; empty where it is not witnessed.
        seen_tokens: how many tokens of a prompt its last token sees; None for all of them.
        dtype: of the items.
    """

    planes: tuple[Plane, ...]
    tables: tuple[Table, ...]
    first_layer: str
    seen_tokens: int | None
    dtype: torch.dtype


def witnessed_planes(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> WitnessedPlanes:
    """What is witnessed of a worker's tensors, as the model writes to them.

    Raises:
        WitnessRefused: nothing, and why.
        UnreadableGeometry, RegistrationRefused, UnexpectedCaches: as of caches that cannot be read.
    """
    cache = _readable(release, kv_caches)
    layers, groups, _ = cache
    numbers = {name: n for n, group in enumerate(groups) for name in group.layers}
    tokens = _block_tokens(release)
    names = sorted(layers, key=place_in_model)
    found: dict[tuple[int, object], Plane] = {}
    for name in names:
        if layers[name].kind in (ROWS, LATENT):
            # Layers that share a cache are written to once.
            found |= {(p.address, p.content): p for p in layers[name].planes if not p.is_whole}
    if len({plane.layer for plane in found.values()}) < 2:
        raise WitnessRefused("fewer than two layers hold rows of tokens: none depends on the rest")
    planes = tuple(found.values())
    groups_of_planes = (numbers[plane.layer] for plane in planes)
    return WitnessedPlanes(
        planes,
        tuple(Table(group, tokens[group]) for group in groups_of_planes),
        names[0] if planes[0].layer == names[0] else "",
        _seen_tokens(release, groups),
        _dtype_of(release, kv_caches, layers),
    )


def _readable(release: ReleaseWorker, kv_caches: Mapping[str, Any]) -> Cache:
    config = release.worker.vllm_config
    if reserves_slots(config):
        raise WitnessRefused("a drafter computes the prompt's last tokens too")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise WitnessRefused("with several pipeline stages no stage has all layers")
    if not all(hasattr(cache, "untyped_storage") for cache in kv_caches.values()):
        raise WitnessRefused("recurrent state, or memory that cannot be looked at")
    if max(release.context_sizes, default=1) > 1:
        raise WitnessRefused("context parallelism shares out the tokens")
    cache = read_cache(release, kv_caches)
    if cache is None:
        raise WitnessRefused("kvpatch cannot tell where every token of this cache lies")
    if any(group.has_state for group in cache[1]):
        raise WitnessRefused("recurrent state")
    return cache


def _block_tokens(release: ReleaseWorker) -> tuple[int, ...]:
    """Tokens of a block of each cache group, as the scheduler counts them."""
    if not release.facts.has_cache_groups:
        return (int(release.worker.vllm_config.cache_config.block_size),)
    groups = transferred_groups(release.worker.kv_cache_config, release.facts)
    return tuple(int(group.kv_cache_spec.block_size) for group in groups)


def _seen_tokens(release: ReleaseWorker, groups: tuple[Group, ...]) -> int | None:
    """The largest window, where every layer has one."""
    windows = [group.window_tokens for group in groups]
    if all(windows):
        return max(windows)
    # One that all layers have without a group of its own, as where there are no groups.
    everywhere = release.worker.vllm_config.cache_config.sliding_window
    return None if everywhere is None else int(everywhere)


def _dtype_of(
    release: ReleaseWorker, kv_caches: Mapping[str, Any], layers: Mapping[str, LayerCache]
) -> torch.dtype:
    import torch

    (found, *more) = {kv_caches[name].dtype for name in layers}
    if more:
        raise WitnessRefused("caches of several data types")
    if found.is_floating_point:
        return found
    name = str(release.worker.vllm_config.cache_config.cache_dtype)
    if found.itemsize != 1 or name not in _FP8:
        raise WitnessRefused(f"quantised caches ({name}) whose numbers kvpatch does not read")
    return getattr(torch, _FP8[name])
