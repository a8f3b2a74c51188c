"""Measures real connectors that load a prompt on the device: stock's like pair, and unlike ones."""

from __future__ import annotations

import os
import statistics
from dataclasses import replace

from experiments.gpu.rows import Rows, options_of
from tests.lab import far_memory
from tests.lab.case import EngineSpec
from tests.lab.host import Lab
from tests.lab.stage import Stage

#: 128 KiB of keys and values a token; the dry run's model is smaller.
_MODEL = {"layers": 32, "kv_heads": 8, "head_dim": 128}
_SMALL = {"layers": 4, "kv_heads": 4, "head_dim": 64}
_TURNS = 4
#: (name, P's layout and block, D's, KVPATCH_TRANSFER; empty for stock)
_CASES = (
    ("stock, 64 to 64", ("HND", 64), ("HND", 64), ""),
    ("64 to 64", ("HND", 64), ("HND", 64), "auto"),
    ("128 to 32", ("HND", 128), ("HND", 32), "auto"),
    ("128 to 32, direct", ("HND", 128), ("HND", 32), "direct"),
    ("128 to 32, staged", ("HND", 128), ("HND", 32), "staged"),
    ("32 to 128", ("HND", 32), ("HND", 128), "auto"),
    ("NHD to HND, 64", ("NHD", 64), ("HND", 64), "auto"),
    ("NHD to HND, 64, direct", ("NHD", 64), ("HND", 64), "direct"),
)


def main() -> None:
    """Writes a row for each case: the median of some loads, behind one that shakes hands."""
    options = options_of(__doc__, release="0.33.0")
    is_gpu = options.device == "cuda"
    os.environ[far_memory.MEMORY] = far_memory.GPU if is_gpu else far_memory.COPY
    rows = Rows(options.json)
    tokens, model = (1024, _MODEL) if is_gpu else (256, _SMALL)
    stock = 0.0
    with Lab(options.release) as lab:
        for name, prefill, decode, transfer in _CASES:
            seconds, wrong = _measured(lab, (prefill, decode), transfer, tokens, model)
            stock = stock or seconds
            size = tokens * 2 * 2 * model["layers"] * model["kv_heads"] * model["head_dim"]
            rows.add(
                name,
                is_right=not wrong,
                gb_per_second=size / seconds / 1e9,
                of_like=stock / seconds,
            )


def _measured(
    lab: Lab,
    sides: tuple[tuple[str, int], tuple[str, int]],
    transfer: str,
    tokens: int,
    model: dict[str, int],
) -> tuple[float, int]:
    p, d = (
        EngineSpec(
            layout=layout,
            block_tokens=block,
            planned_blocks=(_TURNS + 2) * tokens // block,
            **model,
        )
        for layout, block in sides
    )
    if transfer:
        d = replace(d, settings=(("KVPATCH_TRANSFER", transfer),))
    found, wrong = [], 0
    with Stage(lab, far_memory.variables()["UCX_TLS"]) as stage:
        prefill, decode = stage.prefill(p), stage.decode(d, patched=bool(transfer))
        for _ in range(_TURNS + 1):
            prompt = stage.prompt(tokens)
            (ask,) = prefill.compute(prompt)
            found.append(decode.timed(ask).seconds)
            wrong += decode.wrong(prompt)[0]
    return statistics.median(found[1:]), wrong


if __name__ == "__main__":
    main()
