"""Draws a staged read: P's blocks, the staging pool, D's blocks, each byte coloured by its token.

    python experiments/draw_staged_read.py docs/pictures/staged_read.png

The bytes are moved by the code that engines use (rounds and numpy copies): what is drawn is
what lies in the three memories afterwards.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from kvpatch.geometry.overlap import overlaps_of
from kvpatch.geometry.plane import Content
from kvpatch.geometry.segments import BlockList, pair_blocks
from kvpatch.geometry.staged_plan import Chunk, Share, plan_chunks
from kvpatch.geometry.tensor_facts import Memory
from kvpatch.transfer.place import place_in_host_memory
from tests.geometry.whole_caches import CacheSizes, named_layout

DRAM = Memory("DRAM")
TOKENS = 14
P_TOKENS, D_TOKENS = 8, 4
P_BLOCKS, D_BLOCKS = (2, 0), (5, 1, 4, 0)
#: One byte for each (token, head): large enough to be seen.
SIZES = CacheSizes(1, 3, 2, P_TOKENS, 1, 1, contents=(Content.LATENT,))
WIDTH = 24


def main() -> None:
    """Writes the picture to the path that is given."""
    p = named_layout("NHD").planes(SIZES, 0, DRAM)
    d = named_layout("HND").planes(replace(SIZES, blocks=6, block_tokens=D_TOKENS), 0, DRAM)
    source = np.zeros(p[0].span()[1], dtype=np.uint8)
    target = np.zeros(d[0].span()[1], dtype=np.uint8)
    at = np.arange(TOKENS)
    blocks = np.array(P_BLOCKS)[at // P_TOKENS]
    for head in range(SIZES.heads):
        p[0].as_array(source, 0)[blocks, head, at % P_TOKENS, 0, 0] = at + 1
    theirs, ours = BlockList(np.array(P_BLOCKS), P_TOKENS), BlockList(np.array(D_BLOCKS), D_TOKENS)
    share = Share(pair_blocks(theirs, ours, 0, TOKENS), overlaps_of([p], d))
    (planned,) = plan_chunks([share], 1 << 20)
    staging = landed(planned, source)
    for placement in planned.placements:
        place_in_host_memory(staging, target, 0, placement)

    figure, rows = plt.subplots(3, 1, figsize=(9, 3.6))
    _memory(
        rows[0], source, P_TOKENS * 2, "P: blocks of 8 tokens, NHD (a token's 2 heads side by side)"
    )
    _memory(rows[1], staging, 64, "D's staging pool: whole blocks of P, in the request's order")
    _memory(
        rows[2], target, D_TOKENS * 2, "D: blocks of 4 tokens, HND (a head's tokens side by side)"
    )
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=120)


def landed(planned: Chunk, source: np.ndarray) -> np.ndarray:
    """The pool after the round's reads."""
    staging = np.zeros(planned.buffer_bytes, dtype=np.uint8)
    columns = (planned.remote_address, planned.staging_offset, planned.length)
    for start, offset, length in zip(*(column.tolist() for column in columns), strict=True):
        staging[offset : offset + length] = source[start : start + length]
    return staging


def _memory(axes: Axes, memory: np.ndarray, block_bytes: int, title: str) -> None:
    """Every byte as a box: its token's colour and number, grey where it holds none."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, 2 * WIDTH + 1)
    axes.set_ylim(0, 1)
    axes.axis("off")
    colours = plt.get_cmap("viridis")
    shown = [i for i in range(memory.size) if block_bytes < 64 or i % 64 < 2 * P_TOKENS]
    for place, index in enumerate(shown):
        token = int(memory[index]) - 1
        face = "#e6e6e6" if token < 0 else colours(token / TOKENS)
        axes.add_patch(plt.Rectangle((place, 0.15), 1, 0.7, facecolor=face, edgecolor="white"))
        if token >= 0:
            shade = "white" if token < TOKENS * 0.6 else "black"
            axes.text(
                place + 0.5, 0.5, str(token), ha="center", va="center", fontsize=6, color=shade
            )
        if index % block_bytes == 0:
            axes.plot([place, place], [0, 1], color="black", linewidth=1.2)


if __name__ == "__main__":
    main()
