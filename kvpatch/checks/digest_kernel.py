"""Digests a piece of a cache on a GPU in one launch: a Triton kernel, where Triton runs.

Each program sums a few tokens of a few heads, all words of a row at once, and adds each head's sum
to a cell. All numbers are whole and wrap at 64 bits, so the order in which programs add does not
matter. ``digest_pieces.py`` does the same by torch's operations: this is compared with it, and it
is what devices without Triton use.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from kvpatch.checks.digest_pieces import DigestPiece
from kvpatch.checks.digests import WORD_BYTES, rows_of
from kvpatch.transfer.kernel_thread import is_ready, noise_on
from kvpatch.transfer.one_memory import Bytes
from kvpatch.transfer.plane_bytes import uploaded

#: Tokens of one program at most: as many as the smallest range has.
_TOKENS = 16
#: Heads of one program, one after another: they share what it works out of the table.
_HEADS = 4
#: Words of one head at once at most, with those that a row does not fill.
_WORDS = 4096
#: By bytes.
_UNITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
#: Of noise, that the kernel is tried on.
_BLOCKS = 4


def sums_surely(piece: DigestPiece) -> torch.Tensor:
    """Does :func:`sums_by_kernel`, or torch's operations until that has been tried.

    Triton compiles the kernel for each kind of rows, and each is tried.
    """
    alike = piece.alike
    axes = len(alike.axes), len(alike.planes[0].token_axes)
    kind = "digests", alike.unit, rows_of(alike.row_bytes)[1], *axes
    if is_ready(alike.memory.memory.device, kind, partial(_is_right_for, piece)):
        return sums_by_kernel(piece)
    return piece.sums_by_torch()


def _is_right_for(piece: DigestPiece) -> bool:
    """Returns True if the kernel comes to the sums of torch, of a piece like this one of noise.

    The cache itself may be another request's by now. Axes lie in the order in which they do there.
    """
    alike, device, size = copy(piece.alike), piece.alike.memory.memory.device, 1
    alike.axes = list(alike.axes)
    for number, (items, _) in sorted(enumerate(alike.axes), key=lambda axis: axis[1][1]):
        alike.axes[number] = items, size
        size *= items
    alike.step = -(-size // WORD_BYTES) * WORD_BYTES * alike.unit
    alike.memory = Bytes(alike.first, noise_on(device, _BLOCKS * alike.step))
    numbers = np.arange(piece.numbers.size).reshape(piece.numbers.shape) % _BLOCKS
    tried = piece._replace(alike=alike, numbers=numbers)
    return bool(torch.equal(sums_by_kernel(tried), tried.sums_by_torch()))


def sums_by_kernel(piece: DigestPiece) -> torch.Tensor:
    """Does :meth:`DigestPiece.sums_by_torch` in one launch, in the current stream."""
    alike, (planes, blocks) = piece.alike, piece.numbers.shape
    plane, cache = alike.planes[0], alike.memory.memory
    rows, words = rows_of(alike.row_bytes)
    width = triton.next_power_of_2(words)
    tokens = min(_TOKENS, _WORDS // width)
    unit = min(alike.unit, WORD_BYTES)
    (heads, head_step), *axes, (run, _) = [(n, step * alike.unit) for n, step in alike.axes]
    of_tokens, of_runs = axes[: len(plane.token_axes)], axes[len(plane.token_axes) :]
    borders = (piece.borders // rows).tolist()
    tiles = [
        (first, min(first + tokens, end), number)
        for number, (start, end) in enumerate(pairwise(borders))
        for first in range(start, end, tokens)
    ]
    head = [  # the kernel reads it in this order; all steps are in bytes
        cache.data_ptr() + alike.first - alike.memory.address,
        alike.step,
        *(heads, head_step),
        *(blocks, plane.counts.block_tokens),
        *(rows, words, alike.row_bytes // unit),
        *(len(tiles), len(borders) - 1),
        *_two_axes(of_tokens),
        run * alike.unit // unit,
        *_two_axes(of_runs),
    ]
    parts = head, piece.words.view(np.int64), piece.rows.view(np.int64), tiles, piece.numbers
    (table,) = uploaded([np.concatenate([np.ravel(part) for part in parts])], cache.device)
    found = torch.zeros((planes, heads, len(borders) - 1), dtype=torch.int64, device=cache.device)
    programs = planes * -(-heads // _HEADS) * len(tiles) * rows
    sizes = {"WIDTH": width, "TOKENS": tokens, "HEADS": _HEADS, "HEAD": len(head)}
    _add_up[(programs,)](table, found, UNIT=_UNITS[unit], **sizes)
    return found


def _two_axes(axes: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Returns (inner size, inner step, outer step) of two axes at most, the outer one first."""
    (_, outer), (size, inner) = ([(1, 0), (1, 0)] + axes)[-2:]
    return size, inner, outer


@triton.jit
def _plus(one, other):  # type: ignore[no-untyped-def]
    return one + other


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    table,
    found,
    UNIT: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    HEAD: tl.constexpr,  # noqa: N803
):
    """Adds some tokens of a few heads to their cells."""
    heads, blocks = tl.load(table + 2).to(tl.int32), tl.load(table + 4).to(tl.int32)
    block_tokens, rows = tl.load(table + 5).to(tl.int32), tl.load(table + 6).to(tl.int32)
    words, tiles = tl.load(table + 7).to(tl.int32), tl.load(table + 9).to(tl.int32)
    words_at = table + HEAD
    rows_at = words_at + words
    of_rows = blocks * block_tokens * rows
    tiles_at = rows_at + 2 * of_rows
    program = tl.program_id(0)
    rest = program // rows
    part = program - rest * rows
    group = rest // tiles
    tile = tiles_at + 3 * (rest - group * tiles)
    groups = (heads + HEADS - 1) // HEADS
    plane = group // groups
    first_head = (group - plane * groups) * HEADS

    token = tl.load(tile).to(tl.int32) + tl.arange(0, TOKENS)
    is_token = token < tl.load(tile + 1).to(tl.int32)
    block = token // block_tokens
    inside = token - block * block_tokens
    inner_tokens = tl.load(table + 11).to(tl.int32)
    outer = inside // inner_tokens
    numbers_at = tiles_at + 3 * tiles + plane * blocks
    number = tl.load(numbers_at + block, mask=is_token, other=0)
    row_at = tl.load(table) + number * tl.load(table + 1) + outer * tl.load(table + 13)
    row_at += (inside - outer * inner_tokens) * tl.load(table + 12)
    row = rows_at + token * rows + part
    low = tl.load(row, mask=is_token, other=0)
    high = tl.load(row + of_rows, mask=is_token, other=0)

    run_units, inner_runs = tl.load(table + 14).to(tl.int32), tl.load(table + 15).to(tl.int32)
    units = tl.load(table + 8).to(tl.int32)
    unit_bits: tl.constexpr = UNIT.primitive_bitwidth
    place = tl.arange(0, WIDTH)
    is_word = place < words
    weights = tl.load(words_at + place, mask=is_word, other=0)
    cells = found + (plane.to(tl.int64) * heads) * tl.load(table + 10) + tl.load(tile + 2)
    for head in range(first_head, min(first_head + HEADS, heads)):
        head_at = row_at + head * tl.load(table + 3)
        word = tl.full((TOKENS, WIDTH), 0, tl.uint32)
        for nth in tl.static_range(32 // unit_bits):
            unit = (part * words + place) * (32 // unit_bits) + nth
            run = unit // run_units
            outer_run = run // inner_runs
            unit_at = (unit - run * run_units).to(tl.int64) * (unit_bits // 8)
            unit_at += (run - outer_run * inner_runs) * tl.load(table + 16)
            unit_at += outer_run * tl.load(table + 17)
            at = (head_at[:, None] + unit_at[None, :]).to(tl.pointer_type(UNIT))
            is_there = is_token[:, None] & (is_word & (unit < units))[None, :]
            piece = tl.load(at, mask=is_there, other=0)
            word |= piece.to(tl.uint32) << (nth * unit_bits)
        signed = word.to(tl.int32, bitcast=True).to(tl.int64)
        sums = tl.reduce(signed * weights[None, :], 1, _plus)
        cell = tl.reduce((sums & 0xFFFFFFFF) * low + (sums >> 32) * high, 0, _plus)
        tl.atomic_add(cells + head * tl.load(table + 10), cell)
