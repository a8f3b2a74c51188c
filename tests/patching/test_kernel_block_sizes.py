"""Into how many kernel blocks a release cuts blocks, by what its backends take."""

from __future__ import annotations

import pytest

from kvpatch.worker.local_geometry import KernelBlockSizes


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
