"""Each layer is placed inside its own allocation; one range of memory can hold several."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvpatch.core.errors import UnplannableCopy
from kvpatch.geometry.plane_copies import CopyAxis, CopyStrides
from kvpatch.geometry.segments import Segments
from kvpatch.geometry.staged_plan import Placement
from kvpatch.transfer.caches import Caches
from kvpatch.transfer.one_memory import one_memory, storage_of
from kvpatch.transfer.place import place_in_host_memory, place_on_device

LAYERS, BLOCKS, READ = 5, 16, 7
BLOCK_BYTES, LAYER_BYTES = 4096, 16 * 4096
APART_BYTES = 1 << 40
_NORESERVE = 0x4000
#: NHD to HND: [16 tokens, 8 heads, 16 channels of 2 bytes].
STRIDES = CopyStrides(
    2,
    CopyAxis(BLOCKS, BLOCK_BYTES, BLOCK_BYTES),
    CopyAxis(16, 256, 32),
    (CopyAxis(16, 2, 2), CopyAxis(8, 32, 512)),
)


@pytest.fixture
def layers() -> Iterator[list[torch.Tensor]]:
    """A terabyte apart; what lies between them cannot even be read."""
    memory = mmap.mmap(
        -1,
        LAYERS * APART_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
    yield [
        torch.frombuffer(memory, dtype=torch.uint8, offset=layer * APART_BYTES, count=LAYER_BYTES)
        for layer in range(LAYERS)
    ]


def placements_in(layers: list[torch.Tensor], *, is_even: bool) -> tuple[Placement, ...]:
    """Of one prompt; blocks that lie in the buffer with gaps need a gather."""
    ids = np.random.default_rng(0).permutation(BLOCKS)[:READ].astype(np.int64)
    spans = np.arange(READ) if is_even else np.array([0, 1, 2, 4, 5, 7, 8])
    zero = np.zeros(READ, np.int64)
    segments = Segments(spans.astype(np.int64), zero, ids, zero, zero + 16)
    buffer_bytes = 9 * BLOCK_BYTES
    return tuple(
        Placement(str(number), number * buffer_bytes, layer.data_ptr(), STRIDES, segments)
        for number, layer in enumerate(layers)
    )


def noise() -> torch.Tensor:
    found = np.random.default_rng(1).integers(0, 256, LAYERS * 9 * BLOCK_BYTES, dtype=np.uint8)
    return torch.from_numpy(found)


def one_by_one(layers: list[torch.Tensor], wanted: tuple[Placement, ...]) -> list[torch.Tensor]:
    """What each layer holds after its own placement; they are as they were then."""
    for layer, placement in zip(layers, wanted, strict=True):
        address, memory = storage_of(layer)
        place_in_host_memory(noise().numpy(), memory.numpy(), address, placement)
    expected = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    assert all(found.any() for found in expected)
    return expected


def caches_of(layers: list[torch.Tensor]) -> Caches:
    return Caches({str(number): layer for number, layer in enumerate(layers)})


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("way", ["host", "device", "deterministic device"])
def test_layers_a_terabyte_apart(layers, is_even, way):
    """torch's deterministic mode would copy all of the rows elsewhere and back."""
    wanted = placements_in(layers, is_even=is_even)
    expected = one_by_one(layers, wanted)

    if way == "host":
        caches_of(layers).place(noise(), wanted, None)
    else:
        into = [(storage_of(layer), one) for layer, one in zip(layers, wanted, strict=True)]
        torch.use_deterministic_algorithms(way != "device")
        try:
            place_on_device(noise(), into)
        finally:
            torch.use_deterministic_algorithms(False)

    assert all(map(torch.equal, layers, expected))


@pytest.mark.parametrize("bytes_too_far", [-BLOCK_BYTES, 2])
def test_what_would_leave_its_layer_is_refused(layers, bytes_too_far):
    first, *others = placements_in(layers, is_even=True)
    highest = int(first.segments.local_block.max())
    at = first.local_address + (LAYER_BYTES - (highest + 1) * BLOCK_BYTES) + bytes_too_far
    at = at if bytes_too_far > 0 else first.local_address + bytes_too_far
    caches = caches_of(layers)

    with pytest.raises(UnplannableCopy, match="expected to write to layer '0'"):
        caches.place(noise(), (replace(first, local_address=at), *others), None)

    assert not any(layer.any() for layer in layers)


def test_memory_that_was_given_back_is_refused(layers: list[torch.Tensor]) -> None:
    own = [torch.zeros(LAYER_BYTES, dtype=torch.uint8) for _ in layers]
    wanted, caches = placements_in(own, is_even=True), caches_of(own)
    caches.place(noise(), wanted, None)
    own[3].untyped_storage().resize_(0)

    with pytest.raises(UnplannableCopy, match="layer '3'"):
        caches.place(noise(), wanted, None)


@pytest.mark.parametrize("error", [RuntimeError("no such pointer"), None])
def test_a_device_whose_memory_torch_does_not_take(monkeypatch, error):
    """It raises, or it has copied to somewhere else: layers are placed by themselves then."""

    def as_tensor(found: object, device: torch.device) -> torch.Tensor:
        assert "data" in vars(found)["__cuda_array_interface__"]
        if error is not None:
            raise error
        return torch.zeros(8, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)

    storage = SimpleNamespace(data_ptr=lambda: 1 << 40, nbytes=lambda: 8)
    tensor = SimpleNamespace(device=torch.device("cuda"), untyped_storage=lambda: storage)

    assert one_memory([tensor]) is None  # type: ignore[list-item]
