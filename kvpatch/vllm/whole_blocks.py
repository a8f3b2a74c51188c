"""Blocks that move whole or not at all: whether a peer has them as we do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpatch._errors import KvpatchError
from kvpatch.geometry import Plane, UnplannableCopy, check_whole
from kvpatch.vllm.caches import LayerCache

if TYPE_CHECKING:
    from kvpatch.vllm.peers import OurSide
    from kvpatch.vllm.wire import Statement


class CutBlocks(KvpatchError):
    """Whole blocks that would have to be cut; the message says what helps."""


def check_blocks(ours: OurSide, peer: Statement) -> None:
    """Whether a peer's kernel blocks have as many tokens as ours, where ours move whole.

    Raises:
        CutBlocks: they have not.
    """
    if peer.block_tokens in (None, ours.block_tokens):
        return
    for name, layer in ours.layers.items():
        if _is_whole(layer):
            raise CutBlocks(
                f"blocks of layer {name} hold {layer.kind.contents}, and move whole: both sides "
                f"need kernel blocks of one size, {peer.block_tokens} or {ours.block_tokens} "
                "tokens: use one --block-size and one attention backend"
            )


def check_planes(ours: OurSide, theirs: Sequence[Plane]) -> None:
    """Whether a peer's blocks are ours byte for byte, where ours move whole.

    Raises:
        CutBlocks: they are not: other heads, or other layouts.
    """
    found = defaultdict(list)
    for plane in theirs:
        found[plane.layer, plane.content].append(plane)
    for name, layer in ours.layers.items():
        if not _is_whole(layer):
            continue
        for plane in layer.planes:
            for remote in found[name, plane.content]:
                _check(name, layer, remote, plane)


def _check(name: str, layer: LayerCache, remote: Plane, local: Plane) -> None:
    try:
        check_whole(remote, local)
    except UnplannableCopy as error:
        raise CutBlocks(
            f"blocks of layer {name} hold {layer.kind.contents}, and move whole: use one "
            f"--tensor-parallel-size and one VLLM_KV_CACHE_LAYOUT on both sides ({error})"
        ) from error


def _is_whole(layer: LayerCache) -> bool:
    return layer.planes[0].is_whole
