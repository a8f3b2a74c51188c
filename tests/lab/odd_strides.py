"""Tensors as no backend asks for them: an elastic allocator's that nobody has told of.

pool: the layers of one block side by side, `[block, layer, ...][:, layer]`. permuted: heads and
tokens in the other order than the backend's. padded: something behind each block. uneven: the
same, and more of it from layer to layer.
"""

from __future__ import annotations

ODD = ("pool", "permuted", "padded", "uneven")


def odd_strides(
    allocation: str, order: tuple[str, ...], sizes: dict[str, int], layer: int
) -> tuple[dict[str, int], int]:
    """Element strides of every dimension, and how many elements all layers take."""
    gap = 0
    if allocation == "pool":
        order = ("block", "layer", *(dim for dim in order if dim not in ("block", "layer")))
    elif allocation == "permuted":
        turned = {"head": "token", "token": "head"}
        order = tuple(turned.get(dim, dim) for dim in order)
    else:
        gap = sizes["channel"] * 2 * (layer + 1 if allocation == "uneven" else 1)
    strides, step = {}, 1
    for dim in reversed(order):
        step += gap if dim == "block" else 0
        strides[dim] = step
        step *= sizes[dim]
    return strides, step
