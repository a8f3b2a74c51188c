"""What a host buffer costs in real engines; experiments/bench_host_buffer.sh runs this.

Prompts of one length go one by one through a pair of engines without host buffers, which is a like
pair that kvpatch leaves to the release, and through one with host buffers on both sides. The pairs
run side by side and take turns, so that whatever else the machine does meets both. On a CPU the
caches lie in host memory themselves, so that the difference is what the detour costs: P's copies
into the buffer, D's placement out of its staging pool.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from experiments.engines.checkout import importable_in_engines
from experiments.engines.pairs import LAB_PROBE
from experiments.engines.run import HOST_BUFFER
from kvpatch.tools.verify.engine import Engine, EngineSpec
from kvpatch.tools.verify.model import make_tiny_llama
from kvpatch.tools.verify.run import require_kvpatch_as_asked, running, until_signal, vocabulary
from kvpatch.tools.verify.setups import Options, small_engine

BLOCK_TOKENS = 64
BUFFER_BYTES = 128 * 1024**2
WARM_UP = 4
DIRECT, BUFFERED = "direct", "host buffer"
ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Measured:
    """One pair; seconds, of each request."""

    name: str
    prefill_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    saving_s: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    host_bytes: int = 0
    mirror_bytes: int = 0


async def ask(client: httpx.AsyncClient, engine: Engine, tokens: list[int], params: Any) -> Any:
    """One token of an answer."""
    response = await client.post(
        f"{engine.url}/v1/completions",
        json={
            "model": engine.spec.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": params,
        },
        headers={"X-Request-Id": f"kvpatch{uuid.uuid4().hex}"},
        timeout=120,
    )
    response.raise_for_status()
    return response.json().get("kv_transfer_params")


def pair_of(name: str, model: str, *, is_buffered: bool) -> list[EngineSpec]:
    """P and D."""
    settings = (
        ("KVPATCH_HOST_BUFFER", "always" if is_buffered else "never"),
        ("KVPATCH_HOST_BUFFER_BYTES", str(BUFFER_BYTES)),
    )
    return [
        small_engine(
            f"{name.replace(' ', '-')}-{side}",
            model,
            "float32",
            (*LAB_PROBE, "--block-size", str(BLOCK_TOKENS)),
            True,
            True,
            settings,
        )
        for side in ("prefill", "decode")
    ]


async def measure(
    client: httpx.AsyncClient, prefill: Engine, decode: Engine, prompt: list[int], into: Measured
) -> None:
    """One prompt through one pair."""
    before = await prefill.rpc(client, "kvpatch_saved")
    started = time.perf_counter()
    params = await ask(client, prefill, prompt, ASK_PREFILL)
    prefilled = time.perf_counter()
    await ask(client, decode, prompt, params)
    ended = time.perf_counter()
    after = await prefill.rpc(client, "kvpatch_saved")
    into.prefill_s.append(prefilled - started)
    into.first_token_s.append(ended - started)
    into.saving_s.append(after[0]["seconds"] - before[0]["seconds"])
    blocks = after[0]["blocks"] - before[0]["blocks"]
    into.saved_bytes = int(blocks * after[0]["bytes_per_block"])


def show(rows: list[Measured], console: Console) -> None:
    """One table."""
    table = Table(
        "pair", "prefill ms", "first token ms", "saving ms", "saving/prefill", "saved MiB"
    )
    for row in rows:
        saving, prefill = median(row.saving_s), median(row.prefill_s)
        table.add_row(
            row.name,
            f"{prefill * 1e3:.1f}",
            f"{median(row.first_token_s) * 1e3:.1f}",
            f"{saving * 1e3:.2f}" if row.host_bytes else "-",
            f"{saving / prefill:.3f}" if row.host_bytes else "-",
            f"{row.saved_bytes / 2**20:.2f}" if row.host_bytes else "-",
        )
    console.print(table)
    direct, buffered = rows
    pairs = list(zip(direct.first_token_s, buffered.first_token_s, strict=True))
    first, middle, last = quantiles([(ours - theirs) * 1e3 for theirs, ours in pairs], n=4)
    console.print(
        f"first token, host buffer to direct, prompt by prompt: "
        f"{median(ours / theirs for theirs, ours in pairs):.2f}, {middle:+.1f} ms "
        f"(half of them {first:+.1f} to {last:+.1f})",
        highlight=False,
    )
    console.print(
        f"host memory of P: {buffered.host_bytes} bytes; vLLM's mirror of the same cache: "
        f"{buffered.mirror_bytes} bytes ({buffered.host_bytes / buffered.mirror_bytes:.3f})",
        highlight=False,
    )


async def run(arguments: argparse.Namespace, console: Console) -> list[Measured]:
    """Both pairs in turn; whichever was first comes second the next time."""
    folder = Path(tempfile.mkdtemp(prefix="kvpatch-bench-"))
    options = Options(work_dir=folder)
    model = str(make_tiny_llama(folder / "model"))
    specs = [
        *pair_of(DIRECT, model, is_buffered=False),
        *pair_of(BUFFERED, model, is_buffered=True),
    ]
    chance = random.Random(3)
    async with httpx.AsyncClient(trust_env=False) as client:
        console.print("four engines start, which takes a few minutes", highlight=False)
        async with running(specs, client, options, console) as engines:
            await require_kvpatch_as_asked(client, engines)
            ids = sorted(set(await vocabulary(client, engines[0])))
            pairs = [(engines[0], engines[1], DIRECT), (engines[2], engines[3], BUFFERED)]
            rows = {name: Measured(name) for _, _, name in pairs}
            for number in range(-WARM_UP, arguments.requests):
                if number == 0:  # the first ones made pairs meet
                    rows = {name: Measured(name) for name in rows}
                prompt = chance.choices(ids, k=arguments.tokens)
                for prefill, decode, name in pairs:
                    await measure(client, prefill, decode, prompt, rows[name])
                pairs.reverse()
                if number >= 0 and (number + 1) % 10 == 0:
                    console.print(f"{number + 1} of {arguments.requests} prompts", highlight=False)
            found = HOST_BUFFER.search(engines[2].log.read_text(errors="replace"))
            if not found:
                raise SystemExit(f"{engines[2].spec.name} has no host buffer")
            buffered = rows[BUFFERED]
            buffered.host_bytes, buffered.mirror_bytes = int(found[1]), int(found[4])
    return [rows[DIRECT], rows[BUFFERED]]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="through each pair")
    parser.add_argument("--tokens", type=int, default=800, help="of each prompt")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 132)
    importable_in_engines()
    rows = until_signal(run(arguments, console))
    show(rows, console)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
