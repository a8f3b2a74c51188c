"""Prints the geometry of a running engine's cache; experiments/layout_dump.sh runs this."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from experiments.engines.checkout import importable_in_engines
from experiments.engines.pairs import LAB_PROBE
from kvpatch.core.errors import KvpatchError
from kvpatch.tools.verify.engine import call_rpc, require_environment
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import running
from kvpatch.tools.verify.setups import Options, small_engine

_METHOD = "kvpatch_layout"


async def layout_of(url: str) -> list[list[dict[str, Any]]]:
    """Per rank, the description of every layer of the engine at ``url``."""
    async with httpx.AsyncClient() as client:
        return await call_rpc(client, url.rstrip("/"), _METHOD)


async def layout_of_tiny_engine(console: Console) -> list[list[dict[str, Any]]]:
    """The same of a tiny engine that is started for the purpose."""
    require_environment(kvpatch=False)
    importable_in_engines()
    with tempfile.TemporaryDirectory(prefix="kvpatch-layout-") as folder:
        options = Options(work_dir=Path(folder))
        model = str(make_tiny_llama(options.work_dir / "model"))
        spec = small_engine("single", model, options.dtype, LAB_PROBE, False, False)
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            running((spec,), client, options, console) as engines,
        ):
            return await engines[0].rpc(client, _METHOD)


def print_layout(console: Console, ranks: list[list[dict[str, Any]]]) -> None:
    """Per rank, a table for each kind of layer, and where each layer of that kind lies."""
    for rank, layers in enumerate(ranks):
        for kind in _alike(layers):
            console.print(_planes_table(rank, kind))
            console.print(_places_table(kind))


def _alike(layers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Layers grouped by everything but their name and place."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        planes = [
            {**plane, "address": plane["address"] - layer["address"]} for plane in layer["planes"]
        ]
        place = {"layer": "", "address": 0, "storage_address": 0, "planes": planes}
        kinds.setdefault(json.dumps({**layer, **place}), []).append(layer)
    return list(kinds.values())


def _planes_table(rank: int, kind: list[dict[str, Any]]) -> Table:
    first = kind[0]
    title = (
        f"rank {rank}, {len(kind)} alike layers: {first['dtype']} {first['device']}, "
        f"shape {first['shape']}, strides {first['strides_bytes']} B, "
        f"blocks of {first['block_tokens']} tokens"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("plane")
    for heading in ("behind tensor", "blocks", "heads", "tokens", "channels"):
        table.add_column(heading, justify="right")
    for plane in first["planes"]:
        axes = zip(plane["counts"], plane["strides_bytes"], strict=True)
        table.add_row(
            plane["content"],
            f"{plane['address'] - first['address']} B",
            *(f"{count} x {stride} B" for count, stride in axes),
        )
    return table


def _places_table(kind: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("layer", overflow="fold")
    for heading in ("address", "in storage at", "storage"):
        table.add_column(heading, justify="right")
    for layer in kind:
        table.add_row(
            layer["layer"],
            f"{layer['address']:#x}",
            f"{layer['address'] - layer['storage_address']} B",
            f"{layer['storage_bytes']} B",
        )
    return table


def main(arguments: list[str]) -> int:
    """``[URL] [--json]``; without a URL a tiny engine is started for the purpose."""
    as_json = "--json" in arguments
    urls = [argument for argument in arguments if argument != "--json"]
    if len(urls) > 1 or any(url.startswith("-") for url in urls):
        print("usage: experiments/layout_dump.sh [URL] [--json]", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    try:
        ranks = asyncio.run(layout_of(urls[0]) if urls else layout_of_tiny_engine(console))
    except KvpatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(ranks, indent=1))
    else:
        print_layout(Console(), ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
