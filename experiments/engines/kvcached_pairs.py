"""kvcached's pairs: which engines each row has, and what their caches must look like.

Everything but :func:`require_layouts` is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.engines.pairs import Kvcached, Row, Side, Single
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.verify.engine import Engine

if TYPE_CHECKING:
    import httpx

_ON_CUDA = Single(model="wide", cuda=True)
_ON_CPU = Single(torch_attention=True)
_WINDOW_ON_CPU = Single(model="window", torch_attention=True)
_HYBRID_ON_CPU = Single(model="hybrid", torch_attention=True)
#: What kvcached's own logger writes before each line.
_LOG_MARK = "[kvcached]"


def _row(name: str, prefill: Side, decode: Side, single: Single = _ON_CUDA) -> Row:
    return Row(name, (prefill,), decode, single)


def _rows_of(layout: Kvcached) -> tuple[Row, ...]:
    """Both sides alike, of different block sizes both ways, and one side without kvcached."""
    large, small = Side(128, kvcached=layout), Side(32, kvcached=layout)
    return (
        _row(layout, small, small),
        _row(f"{layout}-128-32", large, small),
        _row(f"{layout}-32-128", small, large),
        _row(f"{layout}-plain", small, Side(32)),
        _row(f"plain-{layout}", Side(32), small),
        _row(f"{layout}-plain-128-32", large, Side(32)),
        _row(f"plain-{layout}-128-32", Side(128), small),
    )


_C32, _C64, _C128 = (Side(tokens, kvcached="contiguous") for tokens in (32, 64, 128))
_S32, _S64 = (Side(tokens, kvcached="split-half") for tokens in (32, 64))

ROWS: tuple[Row, ...] = (
    _row("plain", Side(32), Side(32)),
    _row("plain-128-32", Side(128), Side(32)),
    *_rows_of("contiguous"),
    *_rows_of("split-half"),
    _row("contiguous-split-half-128-32", _C128, _S32),
    _row("split-half-contiguous-32-128", _S32, _C128),
)

CPU_ROWS: tuple[Row, ...] = (
    _row("contiguous", _C32, _C32, _ON_CPU),
    _row("contiguous-128-32", _C128, _C32, _ON_CPU),
    _row("contiguous-plain", _C32, Side(32), _ON_CPU),
    _row("plain-contiguous", Side(32), _C32, _ON_CPU),
    _row("split-half", _S32, _S32, _ON_CPU),
    _row("split-half-contiguous-32-128", _S32, _C128, _ON_CPU),
    _row("window-contiguous-128-32", _C128, _C32, _WINDOW_ON_CPU),
    _row("hybrid-contiguous", _C64, _C64, _HYBRID_ON_CPU),
    _row("hybrid-contiguous-128-64", _C128, _C64, _HYBRID_ON_CPU),
    _row("hybrid-contiguous-plain", _C64, Side(64), _HYBRID_ON_CPU),
    _row("hybrid-plain-contiguous", Side(64), _C64, _HYBRID_ON_CPU),
    _row("hybrid-split-half", _S64, _S64, _HYBRID_ON_CPU),
)
"""Without a GPU, over stand-ins for what of kvcached needs one (``tests/serving/elastic``)."""


def layout_found(ranks: Sequence[Sequence[dict[str, Any]]]) -> Kvcached | None:
    """Which of kvcached's layouts a layout dump shows, were it kvcached's; None for neither.

    Contiguous is one allocation in whose blocks every layer has its part; split-half one for each
    layer, with both halves or, where keys and values are packed, one.
    """
    found = {_layout_of_rank(layers) for layers in ranks}
    return found.pop() if len(found) == 1 else None


def _layout_of_rank(layers: Sequence[dict[str, Any]]) -> Kvcached | None:
    # Layers of several cache groups have one place.
    apart = list({layer["address"]: layer for layer in layers}.values())
    places = {layer["storage_address"] for layer in apart}
    if len(places) == len(apart) > 1:
        return "split-half"
    planes = [plane for layer in apart for plane in layer["planes"]]
    strides = {plane["strides_bytes"][0] for plane in planes}
    # Of one block: all that the counts behind the first, the blocks', make.
    row_bytes = sum(math.prod(plane["counts"][1:]) * plane["item_bytes"] for plane in planes)
    return "contiguous" if len(places) == 1 and strides == {row_bytes} else None


async def require_layouts(
    client: httpx.AsyncClient, engines: Sequence[Engine], sides: Sequence[Side], folder: Path
) -> None:
    """Write each engine's layout dump to ``folder``, and see that it is what was asked for.

    Raises:
        EngineFailed: kvcached is on where it should not be, or off, or has another layout.
    """
    for engine, side in zip(engines, sides, strict=True):
        ranks = await engine.rpc(client, "kvpatch_layout")
        (folder / f"layout-{engine.spec.name}.json").write_text(json.dumps(ranks, indent=1) + "\n")
        complain_of(engine.spec.name, side, ranks, engine.log.read_text(errors="replace"))


def complain_of(name: str, side: Side, ranks: Sequence[Sequence[dict[str, Any]]], log: str) -> None:
    """Raise :class:`EngineFailed` unless the dump and the log are of the side's kvcached."""
    is_on = _LOG_MARK in log
    if is_on is not bool(side.kvcached):
        raise EngineFailed(
            f"{name}: expected kvcached to be {'on' if side.kvcached else 'off'}, and its log has "
            f"{'lines' if is_on else 'no line'} of it; is kvcached installed beside this vLLM?"
        )
    if side.kvcached and layout_found(ranks) != side.kvcached:
        found = layout_found(ranks) or "neither of kvcached's layouts"
        raise EngineFailed(f"{name}: expected kvcached's {side.kvcached} layout, found {found}")
