"""Draws what a patch changes: the memory of one layer, and what is registered of it.

    python experiments/draw_layouts.py docs/pictures/split_half.png

Everything drawn is computed from planes; nothing is placed by hand.
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from kvpatch.geometry.plane import Content, Plane
from kvpatch.geometry.tensor_facts import Memory
from tests.geometry.whole_caches import CacheSizes, named_layout

BLOCKS = 6
KEY, VALUE, STOCK, GAP = "#4477aa", "#ee9933", "#bb3344", "#e6e6e6"
SIZES = CacheSizes(layers=1, blocks=BLOCKS, heads=1, block_tokens=1, channels=1, item_bytes=1)


def main() -> None:
    """Writes the picture to the path that is given."""
    keys, values = named_layout("kvcached_split_half").planes(
        SIZES, 0, Memory("DRAM"), value_offset_bytes=BLOCKS + 2
    )
    end = values.span()[1]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 4.2), sharex=True)
    _memory(top, keys, values, end)
    _stock(middle, end)
    _kvpatch(bottom, keys, values)
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=120)


def _row(axes: Axes, title: str, end: float) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1)
    axes.axis("off")


def _cell(axes: Axes, start: float, width: float, text: str, color: str) -> None:
    axes.barh(0.5, width, 0.9, left=start, color=color, edgecolor="white", linewidth=2)
    axes.text(start + width / 2, 0.5, text, ha="center", va="center", fontsize=9, color="white")


def _planes(axes: Axes, *planes: Plane) -> None:
    for plane in planes:
        letter, color = ("K", KEY) if plane.content is Content.KEY else ("V", VALUE)
        for block in range(BLOCKS):
            _cell(
                axes,
                plane.address + block * plane.strides_bytes.block,
                1,
                f"{letter}{block}",
                color,
            )


def _memory(axes: Axes, keys: Plane, values: Plane, end: int) -> None:
    _row(axes, "one layer's memory: keys of all blocks, room to grow, values of all blocks", end)
    axes.barh(0.5, end, 0.9, color=GAP)
    _planes(axes, keys, values)


def _stock(axes: Axes, end: int) -> None:
    _row(axes, "stock 0.23 registers blocks of [K, V] side by side: wrong bytes, no error", end)
    for block in range(BLOCKS):
        _cell(axes, 2 * block, 1, f"K{block}?", STOCK)
        _cell(axes, 2 * block + 1, 1, f"V{block}?", STOCK)


def _kvpatch(axes: Axes, keys: Plane, values: Plane) -> None:
    _row(
        axes, "kvpatch registers keys and values as the two regions that they are", values.span()[1]
    )
    _planes(axes, keys, values)


if __name__ == "__main__":
    main()
