"""Which plain peers may be kvcached's with keys and values apart, by their numbers of blocks."""

from __future__ import annotations

import pytest

from kvpatch.peer.agent_metadata import AgentMetadata
from kvpatch.peer.block_shapes import PAGE_BYTES, may_be_kvcacheds
from kvpatch.worker.local_geometry import KernelBlockSizes


def _peer(blocks: int, block_bytes: int) -> AgentMetadata:
    return AgentMetadata(
        "p", 0, 1, 16, 1, "NHD", blocks, (0,), (block_bytes,), (block_bytes,), None, 0
    )


@pytest.mark.parametrize(
    ("half_bytes", "pages"),
    [(32 << 10, 1), (32 << 10, 77), (48 << 10, 5), (20_000, 9), (3 << 20, 7), (2 << 20, 1)],
)
def test_every_number_that_kvcached_could_cut_is_one(half_bytes: int, pages: int) -> None:
    """As kvcached 0.1.6 counts: whole pages of all keys, divided by a block's."""
    blocks = pages * PAGE_BYTES // half_bytes

    assert may_be_kvcacheds(_peer(blocks, 2 * half_bytes), (1,))
    # And where each of its blocks is cut into kernel blocks.
    assert may_be_kvcacheds(_peer(4 * blocks, 2 * half_bytes // 4), (1, 2, 4))


@pytest.mark.parametrize("blocks", [63, 65, 1000])
def test_others_are_none(blocks: int) -> None:
    assert not may_be_kvcacheds(_peer(blocks, 64 << 10), (1,))


def test_a_block_cut_in_more_parts_leaves_more_over() -> None:
    """62 kernel blocks of 32 KiB: 31 whole blocks of 64 KiB, of which a page has 32."""
    assert not may_be_kvcacheds(_peer(62, 64 << 10), (2,))
    assert may_be_kvcacheds(_peer(60, 64 << 10), (1, 5))


# --- into how many kernel blocks a release cuts blocks -----------------------------------------


@pytest.mark.parametrize(
    ("kernel_tokens", "parts"), [(16, (1,)), (32, (1,)), (64, (1, 2, 4)), (48, None)]
)
def test_flashinfer_cuts_what_is_larger_than_64(
    kernel_tokens: int, parts: tuple[int, ...] | None
) -> None:
    sizes = KernelBlockSizes(((16, 32, 64),), ((),), blocks=(1, 8, 16, 32, 64, 128, 256))
    found = sizes.parts(kernel_tokens)
    assert found == parts if parts else len(found) > 50
    assert sizes.cuts_some


def test_blocks_of_any_size_are_cut_oddly() -> None:
    """From 0.18 on 96 is a size too, and 32 the largest that divides it."""
    assert KernelBlockSizes(((16, 32, 64),), ((),)).parts(32)[:3] == (1, 3, 5)


def test_backends_that_take_multiples_cut_none() -> None:
    sizes = KernelBlockSizes(((), ()), ((16,), (1,)))
    assert sizes.parts(48) == (1,) and not sizes.cuts_some
    assert KernelBlockSizes(((64,), ()), ((), (16,))).parts(64)[:2] == (1, 2)
