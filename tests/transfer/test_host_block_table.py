"""The host block table, against a model that remembers what was written where.

The model's host is a list of what each host block holds, changed by the copies that the table
asks for and by nothing else. A block's content is a number that grows when it is written.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

from kvpatch.core.errors import NeverFits, NotReserved, NotSaved
from kvpatch.host_buffer.host_block_table import HostBlockTable

pytestmark = pytest.mark.patching


class Host:
    """What a worker would hold: the device's blocks, and host blocks that copies alone change."""

    def __init__(self, host_blocks: int) -> None:
        self.blocks: dict[int, int] = {}
        self.host_blocks: list[int | None] = [None] * host_blocks
        self.copied = 0

    def write(self, block: int) -> None:
        self.blocks[block] = max(self.blocks.values(), default=0) + 1

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for block, host_block in pairs:
            self.host_blocks[host_block] = self.blocks[block]
        self.copied += len(pairs)

    def holds(self, host_block: int, block: int) -> bool:
        return self.host_blocks[host_block] == self.blocks[block]


class Model:
    """Any order of calls; after each, what was published is still what it was."""

    def __init__(self, table_class: type[HostBlockTable], host_blocks: int) -> None:
        self.table = table_class(host_blocks)
        self.host = Host(host_blocks)
        self.size = host_blocks
        self.reserved: dict[str, int] = {}
        self.queue: OrderedDict[str, int] = OrderedDict()
        #: Content of each block when the request saved it, and how many host blocks it took.
        self.saved: dict[str, dict[int, int]] = {}
        self.spent: dict[str, int] = {}
        #: Those that wanted more than they have reserved.
        self.short: set[str] = set()
        #: (request, host block) -> content that was published.
        self.published: dict[tuple[str, int], int] = {}

    def reserve(self, name: str, blocks: int) -> None:
        if name in self.reserved:
            assert self.table.reserve(name, blocks)
            return
        if blocks > self.size:
            with pytest.raises(NeverFits, match=f"needs {blocks} blocks .* has {self.size}:"):
                self.table.reserve(name, blocks)
            self.queue.pop(name, None)
            return
        self.queue[name] = blocks
        first = next(iter(self.queue)) == name
        fits = sum(self.reserved.values()) + blocks <= self.size
        assert self.table.reserve(name, blocks) == (first and fits)
        if first and fits:
            self.reserved[name] = self.queue.pop(name)
            self.saved[name], self.spent[name] = {}, 0

    def write(self, blocks: list[int]) -> None:
        self.table.written(blocks)
        for block in dict.fromkeys(blocks):
            self.host.write(block)
            for name, contents in self.saved.items():
                # What nobody was told of is forgotten, what somebody may read is not.
                if block in contents and not self._is_published(name, contents[block]):
                    del contents[block]
                    self.spent[name] -= 1

    def _is_published(self, name: str, content: int) -> bool:
        return any(n == name and found == content for (n, _), found in self.published.items())

    def save(self, name: str, blocks: list[int]) -> None:
        for block in blocks:
            if block not in self.host.blocks:
                self.write([block])
        contents = self.saved.get(name, {})
        new = {b for b in blocks if contents.get(b) != self.host.blocks[b]}
        if name not in self.reserved or self.spent[name] + len(new) > self.reserved[name]:
            with pytest.raises(NotReserved):
                self.table.save(name, blocks)
            self.short |= {name} & set(self.reserved)
            return
        there = {content for content in self.host.host_blocks if content is not None}
        pairs = self.table.save(name, blocks)
        assert {block for block, _ in pairs} <= new
        for block, _ in pairs:
            assert all(
                self.host.blocks[block] not in others.values() for others in self.saved.values()
            ), "somebody holds it: copying it again is not needed"
        assert all(len(set(column)) == len(pairs) for column in zip(*pairs, strict=True))
        self.host.copy(pairs)
        kept = {self.host.blocks[block] for block in new} & there
        assert len(pairs) >= len(new) - len(kept)
        for block in new:
            contents[block] = self.host.blocks[block]
        self.spent[name] += len(new)

    def publish(self, name: str, picks: list[int]) -> None:
        contents = self.saved.get(name, {})
        known = sorted(contents)
        blocks = [known[pick % len(known)] for pick in picks if known]
        if name not in self.reserved or name in self.short:
            with pytest.raises(NotSaved):
                self.table.host_blocks_of(name, blocks)
            return
        unknown = next(block for block in range(1, 99) if block not in contents)
        with pytest.raises(NotSaved, match=f"1 of {len(blocks) + 1} blocks"):
            self.table.host_blocks_of(name, [*blocks, unknown])
        host_blocks = self.table.host_blocks_of(name, blocks)
        for block, host_block in zip(blocks, host_blocks, strict=True):
            assert self.host.host_blocks[host_block] == contents[block]
            self.published[name, host_block] = contents[block]

    def release(self, name: str) -> None:
        self.table.release(name)
        self.queue.pop(name, None)
        self.short.discard(name)
        for known in (self.reserved, self.saved, self.spent):
            known.pop(name, None)
        self.published = {key: c for key, c in self.published.items() if key[0] != name}

    def what_was_published_is_still_there(self) -> None:
        for (_, host_block), content in self.published.items():
            assert self.host.host_blocks[host_block] == content

    def numbers_agree(self) -> None:
        assert self.table.free == self.size - sum(self.reserved.values())
        assert self.table.waiting == len(self.queue)
        assert self.table.held <= sum(self.spent.values())
        held = {content for contents in self.saved.values() for content in contents.values()}
        assert self.table.held >= len(held), "two contents in one host block"

    def teardown(self) -> None:
        for name in [*self.reserved, *self.queue]:
            self.table.release(name)
        assert (self.table.free, self.table.held, self.table.waiting) == (self.size, 0, 0)


class _TakesWhatIsHeld(HostBlockTable):
    """A fault, for the control: host blocks are taken whoever holds them."""

    def _take(self) -> int:
        self._turn = (getattr(self, "_turn", -1) + 1) % self.size
        self._idle.pop(self._turn, None)
        block = self._block_in[self._turn]
        if block is not None:
            del self._host_block_of[block]
        return self._turn


class _KeepsWhatIsWritten(HostBlockTable):
    """A fault, for the control: a block that is written is taken for saved."""

    def written(self, blocks: Any) -> None:
        pass


class _OverwritesWhatIsPublished(HostBlockTable):
    """A fault, for the control: a request's host block gets its block's new content."""

    def save(self, request_id: str, blocks: Any) -> list[tuple[int, int]]:
        request = self._requests.get(request_id)
        held = dict(request.held) if request else {}
        return [
            (block, held.get(block, host_block))
            for block, host_block in super().save(request_id, blocks)
        ]


def walk(table_class: type[HostBlockTable], seed: int) -> None:
    """A long random walk of few names and blocks, so that they meet."""
    generator = random.Random(seed)
    model = Model(table_class, generator.randint(1, 6))
    for _ in range(300):
        name = f"r{generator.randint(0, 2)}"
        numbers = [generator.randint(1, 5) for _ in range(generator.randint(1, 3))]
        step = generator.choice(("reserve", "reserve", "write", "save", "save", "publish", "end"))
        if step == "reserve":
            model.reserve(name=name, blocks=generator.randint(0, 7))
        elif step == "write":
            model.write(blocks=numbers)
        elif step == "save":
            model.save(name=name, blocks=numbers)
        elif step == "publish":
            model.publish(name=name, picks=numbers)
        elif generator.random() < 0.5:
            model.release(name=name)
        else:
            model.write(blocks=[])
            model.save(name=name, blocks=[])
        model.what_was_published_is_still_there()
        model.numbers_agree()
    model.teardown()


def test_long_walks():
    for seed in range(200):
        walk(HostBlockTable, seed)


@pytest.mark.parametrize(
    "fault", [_TakesWhatIsHeld, _KeepsWhatIsWritten, _OverwritesWhatIsPublished]
)
def test_the_model_notices_a_fault(fault):
    noticed = 0
    for seed in range(50):
        try:
            walk(fault, seed)
        except (AssertionError, KeyError, NotReserved, pytest.fail.Exception):
            noticed += 1
    assert noticed > 10


def test_another_prompt_under_the_same_id_does_not_publish_what_the_first_one_saved():
    """On releases <= 0.13 ids are the clients', who may send one twice."""
    table = HostBlockTable(8)
    assert table.reserve("a", 2)
    table.save("a", [7, 8])
    first = table.host_blocks_of("a", [7, 8])
    assert table.reserve("a", 3), "it is no reason to end the engine"
    assert table.free == 6
    table.written([7, 8, 9])
    with pytest.raises(NotReserved, match="has reserved 2 blocks of the host buffer and needs 5"):
        table.save("a", [7, 8, 9])
    with pytest.raises(NotSaved, match="more blocks than the 2 blocks"):
        table.host_blocks_of("a", [7, 8])
    assert table.reserve("b", 6)
    assert not {host_block for _, host_block in table.save("b", range(20, 26))} & set(first)
    table.release("a")
    assert table.reserve("a", 2) and table.save("a", [7, 8])
    assert table.host_blocks_of("a", [7, 8])


def test_what_a_host_block_still_holds_is_not_copied_again():
    table = HostBlockTable(4)
    assert table.reserve("a", 2)
    pairs = table.save("a", [7, 8])
    table.release("a")
    assert table.reserve("c", 3)
    (copied,) = table.save("c", [8, 7, 9])
    assert copied[0] == 9
    assert table.host_blocks_of("c", [7, 8]) == tuple(host_block for _, host_block in pairs)


def test_a_request_that_is_complete_keeps_what_it_holds():
    """Its next token goes to the same block, whose host block may be read already."""
    table = HostBlockTable(4)
    assert table.reserve("a", 2) and table.reserve("b", 1)
    held = dict(table.save("a", [7, 8]))
    table.written([8], but_held_by="a")
    assert table.host_blocks_of("a", [7, 8]) == (held[7], held[8])
    ((_, host_block),) = table.save("b", [8])
    assert host_block not in held.values(), "what is in the block now is something else"
    for name in ("a", "b"):
        table.release(name)
    assert (table.free, table.held) == (4, 0)


def test_host_blocks_unused_for_longest_are_taken_first_and_empty_ones_before_them():
    table = HostBlockTable(3)
    for name, block in (("a", 1), ("b", 2)):
        assert table.reserve(name, 1)
        table.save(name, [block])
        table.release(name)
    assert table.reserve("c", 2)
    table.save("c", [3])  # the one that never held anything
    ((_, host_block),) = table.save("c", [4])  # where block 1 was
    table.release("c")
    assert table.reserve("d", 1)
    assert table.save("d", [2]) == []
    assert host_block == 0


def test_new_blocks_get_host_blocks_beside_each_other():
    table = HostBlockTable(8)
    assert table.reserve("a", 4)
    table.save("a", [9, 3, 5, 1])
    table.release("a")
    table.written([9, 3, 5, 1])
    assert table.reserve("b", 4)
    host_blocks = [host_block for _, host_block in table.save("b", [20, 21, 22, 23])]
    assert host_blocks == list(range(host_blocks[0], host_blocks[0] + 4))
