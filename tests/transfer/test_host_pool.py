"""The host pool against a copy of one element at a time (``test_late_device.py``: with streams).

Caches are made by naming axes from the outermost to the innermost in memory, and the
dimensions of the tensor that shows them, apart from what the pool works out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.core.errors import RegistrationRefused, UnexpectedCaches
from kvpatch.host_buffer import block_copies, host_pool
from kvpatch.host_buffer.host_pool import HostPool, block_bytes, mirror_bytes
from tests.storageless import StoragelessStandIn

pytestmark = pytest.mark.patching

DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Tensors = dict[str, torch.Tensor]
AXES = ("layer", "kv", "block", "token", "head", "channel", "packed")
SIZES = (2, 2, 5, 4, 2, 3, 6)


@dataclass(frozen=True)
class Cache:
    """Layers of one form.

    Attributes:
        memory: axes from the outermost to the innermost. Where "layer" comes first and
            `own` is true, each has a storage of its own.
        dimensions: of each layer's tensor.
        parts: kernel blocks in a block.
        gap: elements between one step of the outermost axis and the next, unused.
        lead: unused elements at the start of each storage.
    """

    memory: tuple[str, ...]
    dimensions: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=lambda: dict(zip(AXES, SIZES, strict=True)))
    own: bool = True
    parts: int = 1
    gap: int = 0
    lead: int = 0
    item_bytes: int = 2

    @property
    def blocks(self) -> int:
        return self.sizes["block"]

    def pooled(self, host_blocks: int = 3, **how: Any) -> Pooled:
        dimension = self.dimensions.index("block")
        return Pooled(self.tensors(), dimension, self.blocks, host_blocks, **how)

    def tensors(self, prefix: str = "layer") -> Tensors:
        sizes = {**self.sizes, "block": self.blocks * self.parts}
        gapped = self.memory[self.memory[0] == "layer"]
        strides, step = {}, 1
        for axis in reversed(self.memory):
            strides[axis] = step + (self.gap if axis == gapped else 0)
            step = strides[axis] * sizes[axis]
        apart = self.own and self.memory[0] == "layer"
        found = {}
        if not apart:
            store = noise(self.lead + step, self.item_bytes)
        for layer in range(sizes["layer"]):
            offset = self.lead + (0 if apart else layer * strides["layer"])
            if apart:
                store = noise(self.lead + strides["layer"], self.item_bytes)
            found[f"{prefix}.{layer}"] = store.as_strided(
                [sizes[d] for d in self.dimensions], [strides[d] for d in self.dimensions], offset
            )
        return found


def noise(count: int, item_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * item_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(DTYPES[item_bytes])


KV_FIRST = ("kv", "block", "token", "head", "channel")
BLOCKS_FIRST = ("block", "kv", "token", "head", "channel")
PACKED = ("block", "head", "token", "packed")
LATENT = ("block", "token", "channel")

CASES = {
    "NHD, keys first": Cache(("layer", *KV_FIRST), KV_FIRST),
    "HND, keys first": Cache(("layer", "kv", "block", "head", "token", "channel"), KV_FIRST),
    "NHD in a block": Cache(("layer", *BLOCKS_FIRST), BLOCKS_FIRST),
    "HND in a block": Cache(("layer", "block", "kv", "head", "token", "channel"), BLOCKS_FIRST),
    "keys first, kernel blocks": Cache(("layer", *KV_FIRST), KV_FIRST, parts=3),
    "HND in a block, kernel blocks": Cache(
        ("layer", "block", "kv", "head", "token", "channel"), BLOCKS_FIRST, parts=2
    ),
    "halves far apart, blocks first": Cache(("layer", *KV_FIRST), BLOCKS_FIRST, gap=600),
    "packed, own storages": Cache(("layer", *PACKED), PACKED),
    **{
        name: Cache(
            tuple({"L": "layer", "B": "block", "H": "head", "N": "token"}[a] for a in name[:4])
            + ("packed",),
            PACKED,
            own=False,
        )
        for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
    "latent": Cache(("layer", *LATENT), LATENT),
    "latent, kernel blocks": Cache(("layer", *LATENT), LATENT, parts=2),
    "blocks padded": Cache(("layer", *PACKED), PACKED, gap=5),
    "not at its storage's start": Cache(("layer", *KV_FIRST), KV_FIRST, lead=7),
}


def expected(source: torch.Tensor, before: torch.Tensor, dimension: int, pairs, parts: int):
    """What the host blocks' tensor must be: an element at a time, from its indices."""
    host_block_of = {
        host_block * parts + part: block * parts + part
        for block, host_block in pairs
        for part in range(parts)
    }
    found = before.clone()
    for index in product(*(range(size) for size in before.shape)):
        block = host_block_of.get(index[dimension])
        if block is not None:
            found[index] = source[(*index[:dimension], block, *index[dimension + 1 :])]
    return found


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTS[tensor.element_size()])


class Pooled:
    """A pool for some tensors, full of noise, and what its host blocks must hold.

    Args:
        dimension: of each tensor that counts its blocks.
        shown: what the pool sees in the tensors' place.
    """

    def __init__(
        self,
        tensors: Tensors,
        dimension: int,
        blocks: int,
        host_blocks: int,
        shown: Tensors | None = None,
        **how: Any,
    ) -> None:
        self.tensors, self.dimension, self.blocks = tensors, dimension, blocks
        self.dimensions = dict.fromkeys(tensors, dimension)
        self.pool = HostPool(shown or tensors, self.dimensions, blocks, host_blocks, **how)
        self.host = self.pool.tensors
        for number, tensor in enumerate(self.host.values()):
            ints = as_ints(tensor)
            noise = torch.arange(ints.numel()).mul(31 + number).remainder(127)
            ints.copy_(noise.reshape(ints.shape).to(ints))
        self.before = {layer: as_ints(tensor).clone() for layer, tensor in self.host.items()}

    def save(self, *pairs: tuple[int, int]) -> None:
        """Pairs of a block and a host block."""
        self.pool.save([block for block, _ in pairs], [host_block for _, host_block in pairs])
        self.pool.settle()

    def wrong(self, *pairs: tuple[int, int]) -> list[str]:
        """Layers whose host blocks are not what a copy of single elements makes of them."""

        def is_right(layer: str) -> bool:
            source = as_ints(self.tensors[layer])
            parts = source.shape[self.dimension] // self.blocks
            wanted = expected(source, self.before[layer], self.dimension, pairs, parts)
            return torch.equal(as_ints(self.host[layer]), wanted)

        return [layer for layer in self.tensors if not is_right(layer)]

    def check(self, *pairs: tuple[int, int]) -> HostPool:
        """Saves, and compares all of the host blocks and of the device's."""
        device = {layer: as_ints(tensor).clone() for layer, tensor in self.tensors.items()}
        self.save(*pairs)
        assert self.wrong(*pairs) == []
        for layer, tensor in self.tensors.items():
            assert torch.equal(as_ints(tensor), device[layer]), "the device's blocks are only read"
            like = self.host[layer]
            assert like.dtype == tensor.dtype and like.device.type == "cpu"
            sizes = like.shape[self.dimension], tensor.shape[self.dimension]
            assert sizes[0] * self.blocks == self.pool.host_blocks * sizes[1]
            axes = [axis for axis, size in enumerate(like.shape) if size > 1]
            assert sorted(axes, key=like.stride) == sorted(axes, key=tensor.stride)
        return self.pool


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_layout_like_single_elements(name, item_bytes):
    cache = replace(CASES[name], item_bytes=item_bytes)
    pool = cache.pooled(4).check((3, 0), (0, 2), (1, 3), (4, 1))
    storages = [tensor.untyped_storage() for tensor in pool.tensors.values()]
    assert pool.size_bytes == sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_tensors_without_a_storage_come_by_whole_blocks(name, item_bytes):
    cache = replace(CASES[name], item_bytes=item_bytes)
    tensors = cache.tensors()
    shown = {layer: StoragelessStandIn(tensor) for layer, tensor in tensors.items()}
    made = Pooled(tensors, cache.dimensions.index("block"), cache.blocks, 4, shown)
    StoragelessStandIn.asked.clear()

    made.save((3, 0), (0, 2), (1, 3))

    assert made.wrong((3, 0), (0, 2), (1, 3)) == []
    assert StoragelessStandIn.asked == ["aten.index_select.default"] * len(tensors)
    assert all(tensor.is_contiguous() for tensor in made.host.values())
    of_one = block_bytes(shown, made.dimensions, cache.blocks)
    assert made.pool.size_bytes == 4 * of_one == sum(t.nbytes for t in made.host.values())
    made.save((4, 0))
    assert made.wrong((3, 0), (0, 2), (1, 3)) == list(tensors)


def test_layers_that_share_a_tensor_without_a_storage_are_copied_once():
    cache = CASES["NHD, keys first"]
    one = StoragelessStandIn(cache.tensors()["layer.0"])
    tensors = {"a": one, "b": one}
    pool = HostPool(tensors, {"a": 1, "b": 1}, 5, 3)
    StoragelessStandIn.asked.clear()
    pool.save([4], [2])
    assert len(StoragelessStandIn.asked) == 1
    assert pool.tensors["a"].data_ptr() == pool.tensors["b"].data_ptr()


@settings(max_examples=150, deadline=None)
@given(
    memory=st.permutations(AXES[:-1]),
    dimensions=st.permutations(AXES[1:-1]),
    sizes=st.tuples(*[st.integers(1, 3)] * len(AXES)),
    own=st.booleans(),
    parts=st.integers(1, 2),
    lead=st.integers(0, 3),
    item_bytes=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_any_order_of_axes(memory, dimensions, sizes, own, parts, lead, item_bytes, data):
    sizes = dict(zip(AXES, sizes, strict=True))
    how = {"own": own, "parts": parts, "lead": lead, "item_bytes": item_bytes}
    cache = Cache(tuple(memory), tuple(dimensions), sizes, **how)
    host_blocks = data.draw(st.integers(1, cache.blocks))
    numbers = st.permutations(range(host_blocks))
    into = data.draw(numbers)[: data.draw(st.integers(0, host_blocks))]
    pairs = [(data.draw(st.integers(0, cache.blocks - 1)), host_block) for host_block in into]
    cache.pooled(host_blocks).check(*pairs)


def test_layers_that_share_a_tensor_are_copied_once():
    own = CASES["NHD, keys first"].tensors()
    first = own["layer.0"]
    tensors = {**own, "again": first, "third": first}
    made = Pooled(tensors, 1, 5, 3)
    pool = made.check((4, 2), (1, 0))
    assert pool.tensors["again"].data_ptr() == pool.tensors["layer.0"].data_ptr()
    assert pool.size_bytes == 2 * first.numel() * first.element_size() * 3 // 5
    assert mirror_bytes(tensors) == 4 * first.numel() * first.element_size()
    assert block_bytes(tensors, made.dimensions, 5) * 3 == pool.size_bytes


def test_groups_that_see_the_same_pages_differently():
    """The hybrid allocator: one group's 4 heads of 4 tokens are the other's 2 heads of 8."""
    store = noise(2 * 5 * 4 * 4 * 3, 2)
    wide = store.view(2, 5, 4, 4, 3)
    long = store.view(2, 5, 8, 2, 3)
    kernel = store.view(2, 10, 4, 2, 3)  # in kernel blocks of half the size
    tensors = {"wide": wide, "long": long, "kernel": kernel}
    pool = Pooled(tensors, 1, 5, 3).check((4, 2), (1, 0), (2, 1))
    assert len({t.data_ptr() for t in pool.tensors.values()}) == 1
    assert pool.size_bytes == store.numel() * 2 * 3 // 5


def test_tensors_of_unlike_kinds_side_by_side():
    """Items of 1 and 4 bytes, other forms, logical and kernel blocks in one pool."""
    left, right = CASES["HND in a block"], CASES["latent, kernel blocks"]
    tensors = replace(left, item_bytes=4).tensors("a") | replace(right, item_bytes=1).tensors("b")
    Pooled(tensors, 0, 5, 4).check((4, 2), (1, 0), (2, 3))


def test_rows_of_all_layers_stay_one_storage():
    """A release tells layouts apart by whether layers share an allocation."""
    for name, storages in (("BLHNC", 1), ("LBHNC", 1), ("packed, own storages", 2)):
        host = CASES[name].pooled().host.values()
        assert len({t.untyped_storage().data_ptr() for t in host}) == storages
        starts = [t.data_ptr() for t in host]
        if storages == 1:
            assert starts == sorted(starts)


def test_saves_are_in_order_and_a_host_block_may_be_taken_again():
    made = CASES["LHBNC"].pooled()
    made.save((0, 1), (1, 2))
    made.save((4, 1))
    made.save()
    assert made.wrong((4, 1), (1, 2)) == []


def test_more_than_is_copied_at_once(monkeypatch):
    monkeypatch.setattr(block_copies, "_GATHERED_BYTES", 200)
    for name in ("NHD, keys first", "LHBNC", "blocks padded"):
        for pairs in (
            [(3, 0), (4, 1), (0, 2), (1, 3)],
            [(3, 3), (4, 1), (0, 0)],
            [(1, 0), (2, 1), (3, 2), (4, 3)],
        ):
            CASES[name].pooled(4).check(*pairs)


# --- negative controls --------------------------------------------------------


@pytest.mark.parametrize("name", ["NHD, keys first", "LHBNC", "latent, kernel blocks"])
def test_the_comparison_notices_every_byte_and_every_wrong_host_block(name):
    made = CASES[name].pooled(4)
    layers, pairs = list(made.tensors), [(3, 0), (0, 2)]
    assert made.wrong(*pairs) == layers, "nothing saved yet"
    made.save((3, 2), (0, 0))
    assert made.wrong(*pairs) == layers, "swapped"
    made.save(*pairs)
    assert made.wrong(*pairs) == []
    flat = as_ints(made.host["layer.1"])
    for index in ([0] * flat.ndim, [size - 1 for size in flat.shape]):
        flat[tuple(index)] ^= 1
        assert made.wrong(*pairs) == ["layer.1"]
        flat[tuple(index)] ^= 1
    made.save((1, 3))
    assert made.wrong(*pairs) == layers, "a host block that nobody asked for"


@pytest.mark.parametrize("field_name", ["start", "step_bytes", "row_bytes", "target"])
def test_the_pool_itself_notices_rows_in_the_wrong_place(monkeypatch, field_name):
    real = host_pool.host_storage

    def wrong(*args: Any) -> Any:
        found = real(*args)
        *rows, last = found.rows
        rows.append(last._replace(**{field_name: getattr(last, field_name) - 8}))
        return replace(found, rows=tuple(rows))

    monkeypatch.setattr(host_pool, "host_storage", wrong)
    with pytest.raises(UnexpectedCaches, match="a block of layer.0, layer.1 on cpu is not"):
        replace(CASES["NHD, keys first"], lead=8).pooled()


# --- refusals -----------------------------------------------------------------


def test_a_host_without_so_much_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(host_pool, "free_host_bytes", lambda: 100)
    with pytest.raises(RegistrationRefused, match="3 blocks .* take 144 bytes, .* has 100 free"):
        CASES["latent"].pooled()


def test_free_memory_is_what_the_host_and_the_container_have(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    assert host_pool.free_host_bytes(meminfo, cgroup) is None
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 1000 kB\n")
    assert host_pool.free_host_bytes(meminfo, cgroup) == 1000 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("900000\n")
    assert host_pool.free_host_bytes(meminfo, cgroup) == 1000 * 1024
    (cgroup / "memory.max").write_text("1000000\n")
    assert host_pool.free_host_bytes(meminfo, cgroup) == 100_000
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert host_pool.free_host_bytes(meminfo, cgroup) == 150_000
    assert host_pool.free_host_bytes() > 0


def test_a_device_that_copies_nothing_or_cannot_copy_is_refused(monkeypatch):
    monkeypatch.setattr(block_copies.BlockCopies, "_put", lambda *_, **__: None)
    with pytest.raises(UnexpectedCaches, match="a block of layer.0, layer.1 on cpu is not"):
        CASES["latent"].pooled()

    def no_copies(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(block_copies.BlockCopies, "_put", no_copies)
    with pytest.raises(UnexpectedCaches, match="on cpu cannot be copied.*no such kernel"):
        CASES["latent"].pooled()


# --- memory that is there once a block is handed out ----------------------------


def test_no_block_is_looked_at_before_it_is_saved(monkeypatch):
    looked_at: list[int] = []
    real = HostPool._pair

    def watched(self: HostPool, layer: str, block: int, host_block: int) -> Any:
        looked_at.append(block)
        return real(self, layer, block, host_block)

    monkeypatch.setattr(HostPool, "_pair", watched)
    made = CASES["NHD, keys first"].pooled(is_there_late=True)
    assert not looked_at

    made.save()
    made.save((4, 0), (1, 2))
    made.save((3, 1))

    assert set(looked_at) == {4}, "the first one that is saved, once"
    assert made.wrong((4, 0), (1, 2), (3, 1)) == []


def test_the_first_save_notices_what_the_trial_would_have(monkeypatch):
    pool = CASES["latent"].pooled(is_there_late=True).pool
    monkeypatch.setattr(block_copies.BlockCopies, "_put", lambda *_, **__: None)
    for _ in range(2):
        with pytest.raises(UnexpectedCaches, match="a block of layer.0, layer.1 on cpu is not"):
            pool.save([2], [1])


def test_tensors_that_are_not_in_blocks_are_refused():
    store = noise(4000, 2)
    whole = store.as_strided((5, 4, 6), (24, 6, 1))
    across = store.as_strided((5, 4, 6), (24, 6, 1), 12)
    apart, between = store.as_strided((5, 3, 6), (6, 200, 1)), store.as_strided((5, 6), (6, 1), 100)
    cases = {
        "a multiple of 4 was planned": ([whole], 4),
        "overlap": ([store.as_strided((5, 4, 6), (20, 6, 1))], 5),
        "lie across others": ([whole, across], 5),
        "uneven distances": ([apart, between], 5),
    }
    for message, (tensors, blocks) in cases.items():
        error = UnexpectedCaches if "planned" in message else RegistrationRefused
        named = dict(zip("ab", tensors, strict=False))
        with pytest.raises(error, match=message):
            HostPool(named, dict.fromkeys(named, 0), blocks, 2)


@pytest.mark.parametrize(
    ("blocks", "host_blocks", "message"),
    [
        ([0, 1], [0], "2 blocks for 1 of 1 host blocks"),
        ([0, 1], [2, 2], "2 blocks for 1 of 2 host blocks"),
        ([-1], [0], "block -1 of 5"),
        ([5], [0], "block 5 of 5"),
        ([0], [-1], "host block -1 of 3"),
        ([0], [3], "host block 3 of 3"),
    ],
)
def test_numbers_that_name_nothing_are_errors_and_nothing_is_copied(blocks, host_blocks, message):
    made = CASES["latent"].pooled()
    with pytest.raises(ValueError, match=message):
        made.pool.save(blocks, host_blocks)
    assert made.wrong() == []


def test_a_host_that_cannot_pin_leaves_no_error_to_torch(monkeypatch, caplog):
    """Fakes of CUDA and of a launch: the runtime keeps an error until a launch asks for it."""
    kept: list[str] = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(*_: int) -> int:  # noqa: N802
            kept.append("invalid argument")
            return 1

    class Launched:
        @staticmethod
        def add_(_: int) -> None:
            if kept:
                raise RuntimeError(f"CUDA error: {kept.pop()}")

    device = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: Launched)

    found = host_pool.host_bytes(64, device, device)

    Launched.add_(1)  # the launch that comes next
    assert found.tolist() == [0] * 64
    assert "64 bytes of host buffer cannot be pinned: 1" in caplog.text
