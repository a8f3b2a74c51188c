"""What it takes D to register its cache and to shake hands with a P, at the size of production.

    python experiments/bench_handshake.py [--release 0.32.0] [--json FILE] [--check]

D is a worker of the release's own connector, with real NIXL, in a process of its own for each
row. Its cache and P's are memory that is reserved and never touched: 80 layers, so many blocks
of 16 tokens in each. P's metadata are those of a small worker of the release, with the addresses
and counts of a large one, which a NIXL agent of its own has registered. "time" is what D's
thread took of a processor, which other work on the machine does not add to, and "wall" what
passed; "peak" is resident memory beyond what the process held before. Ratios are to the
faster of two like pairs of stock in this run (the first to run finds the machine's memory cold),
so that the other shows what the measurement cannot tell from 1. With --check the exit status
is 1 where kvpatch takes more than 1.2 of either in any row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.case import EngineSpec
from tests.lab.host import environment
from tests.releases import cache
from tests.releases.fetch import fetch

MOST = 1.2
#: Blocks of the small worker whose metadata P's are made of.
_FEW = 8
_ANSWER = "measured: "
_NORESERVE = 0x4000


@dataclass(frozen=True)
class Row:
    """A pair of engines; what D and P have that the others have not."""

    name: str
    patched: bool = True
    block_tokens: int = 16
    layout: str = "HND"
    ranks: int = 1
    p_rows: bool = False
    d_rows: bool = False


ROWS = (
    Row("like, stock", patched=False),
    Row("like, stock again", patched=False),
    Row("like"),
    Row("P's blocks of 64 tokens", block_tokens=64),
    Row("P in NHD", layout="NHD"),
    Row("kvcached's contiguous pool at P", p_rows=True),
    Row("kvcached's contiguous pool at both", p_rows=True, d_rows=True),
    Row("P of 8 ranks, blocks of 64", block_tokens=64, ranks=8),
    Row("P of 8 ranks, contiguous pools", p_rows=True, ranks=8),
)


@dataclass(frozen=True)
class Measured:
    """One row; descriptors are those of the handshake."""

    name: str
    patched: bool
    register_seconds: float
    handshake_seconds: float
    cpu_seconds: float
    peak_bytes: int
    descriptors: int

    @property
    def wall_seconds(self) -> float:
        """Of both."""
        return self.register_seconds + self.handshake_seconds


# --- in a process of its own -----------------------------------------------------


def reserved(size_bytes: int) -> Any:
    """Memory that nobody has touched, and that takes none before somebody does."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return mmap.mmap(-1, size_bytes, flags=flags)


def reserved_store(elements: int, dtype: Any) -> Any:
    """A flat tensor in such memory."""
    import torch

    raw = torch.frombuffer(reserved(elements * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


def kibibytes(field: str) -> int:
    """A line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class Watch:
    """Seconds and the highest resident memory of some calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds = 0.0
        self.peak_bytes = 0
        self._before = 0

    def start(self) -> None:
        """From here on memory counts."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = kibibytes("VmRSS")

    def time(self, call: Callable[[], None]) -> None:
        """Times one call."""
        used, started = time.thread_time(), time.perf_counter()
        call()
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds += time.thread_time() - used
        self.peak_bytes = (kibibytes("VmHWM") - self._before) * 1024


def play(row: Row, blocks: int, layers: int) -> Measured:
    """Registers and shakes hands once, in this process."""
    import tests.lab.release as release

    release.preload()
    if row.patched:
        import kvpatch

        os.environ["ENABLE_KVPATCH"] = "true"
        kvpatch.enable()
    from tests.lab.engine import Engine
    from tests.lab.engine_api import Start
    from tests.lab.host import EXTRA, PORTS

    watch = Watch()

    class Large(Engine):
        """Its cache is reserved, and its registration timed."""

        _store = staticmethod(reserved_store)

        def _fill(self) -> None:
            pass

        def _connector(self, connector: type[Any], role: str) -> Any:
            made = super()._connector(connector, role)
            register = made.register_kv_caches

            def register_kv_caches(kv_caches: Any) -> None:
                watch.start()
                watch.time(lambda: register(kv_caches))

            made.register_kv_caches = register_kv_caches
            return made

    like = EngineSpec(
        layout="HND", block_tokens=16, planned_blocks=blocks, layers=layers, kv_heads=8,
        head_dim=128,
    )  # fmt: skip
    small = replace(
        as_pool(like, row.p_rows, _FEW), layout=row.layout, block_tokens=row.block_tokens,
        tp_size=row.ranks,
    )  # fmt: skip
    prefill = Engine(Start(small, "P", PORTS.take(row.ranks), 1, EXTRA))
    theirs, kept = enlarged(prefill, blocks * 16 // row.block_tokens)
    decode = Large(Start(as_pool(like, row.d_rows, blocks), "D", PORTS.take(1), 2, EXTRA))
    worker = release.nixl_of(decode.workers[0]).connector_worker

    def shake_hands() -> None:
        for rank, metadata in enumerate(theirs):
            worker.add_remote_agent(metadata, rank, row.ranks)

    watch.time(shake_hands)
    del kept
    return Measured(
        row.name, row.patched, *watch.seconds, watch.cpu_seconds, watch.peak_bytes, decode.prepared
    )


def as_pool(spec: EngineSpec, is_rows: bool, blocks: int) -> EngineSpec:
    """The spec with so many blocks, in kvcached's contiguous layout or as the release has it."""
    if not is_rows:
        return replace(spec, planned_blocks=blocks)
    return replace(spec, planned_blocks=blocks - 1, tensor_blocks=blocks, allocation="contiguous")


def enlarged(prefill: Any, blocks: int) -> tuple[list[Any], list[Any]]:
    """The metadata of a P's ranks as if they had so many blocks, and what has to be kept for it."""
    import msgspec
    from nixl._api import nixl_agent, nixl_agent_config

    import tests.lab.release as release

    found, kept = [], []
    for rank, connector in enumerate(prefill.workers):
        worker = release.nixl_of(connector).connector_worker
        told = worker.xfer_handshake_metadata
        encoded = getattr(told, "agent_metadata_bytes", None)  # from 0.13
        if encoded is not None:
            kind = vars(sys.modules[type(told).__module__])["NixlAgentMetadata"]
            told = msgspec.msgpack.decode(encoded, type=kind)
        strides = getattr(told, "block_strides", None) or told.block_lens
        sizes = [blocks * stride for stride in strides]
        memory = reserved(sum(sizes))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        agent = nixl_agent(f"P-{rank}", nixl_agent_config(num_threads=1))
        agent.register_memory([(start, sum(sizes), 0, "")], "DRAM")
        stated = {
            "agent_metadata": agent.get_agent_metadata(),
            "num_blocks": blocks,
            "kv_caches_base_addr": [start + sum(sizes[:i]) for i in range(len(sizes))],
        }
        if getattr(told, "region_num_blocks", None):  # from 0.30
            stated["region_num_blocks"] = [blocks] * len(sizes)
        found.append(replace(told, **stated))
        kept += [memory, agent]
    return found, kept


# --- the rows --------------------------------------------------------------------


def measure(release: str, row: Row, blocks: int, layers: int) -> Measured:
    """One row, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-handshake-") as home:
        command = [sys.executable, __file__, "--play", json.dumps(asdict(row))]
        command += ["--blocks", str(blocks), "--layers", str(layers)]
        ran = subprocess.run(
            command,
            env=environment(cache.tree(release), Path(home)),
            capture_output=True,
            text=True,
        )
    answers = [line for line in ran.stdout.splitlines() if line.startswith(_ANSWER)]
    if ran.returncode or not answers:
        raise SystemExit(f"{row.name}: exit status {ran.returncode}\n{ran.stderr[-3000:]}")
    return Measured(**json.loads(answers[0].removeprefix(_ANSWER)))


def anchor(rows: Sequence[Measured]) -> Measured:
    """Stock's like pair that took less time."""
    return min((row for row in rows if not row.patched), key=lambda row: row.cpu_seconds)


def missed(rows: Sequence[Measured]) -> list[str]:
    """What kvpatch takes more than 1.2 of, in words."""
    like = anchor(rows)
    return [
        f"{row.name}: {name} {own / stock:.2f} of stock's"
        for row in rows
        if row.patched
        for name, own, stock in (
            ("time", row.cpu_seconds, like.cpu_seconds),
            ("peak memory", row.peak_bytes, like.peak_bytes),
        )
        if own > MOST * stock
    ]


def show(rows: Sequence[Measured], title: str, console: Console) -> None:
    """The table."""
    table = Table(title=title)
    for name in (
        "pair",
        "register s",
        "handshake s",
        "cpu s",
        "ratio",
        "peak MiB",
        "ratio",
        "descriptors",
    ):
        table.add_column(name, justify="left" if name == "pair" else "right")
    like = anchor(rows)
    for row in rows:
        table.add_row(
            row.name, f"{row.register_seconds:.2f}", f"{row.handshake_seconds:.2f}",
            f"{row.cpu_seconds:.2f}", f"{row.cpu_seconds / like.cpu_seconds:.2f}",
            f"{row.peak_bytes / 1024**2:,.0f}", f"{row.peak_bytes / like.peak_bytes:.2f}",
            f"{row.descriptors:,}",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    """Measures, prints, and says whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="0.32.0", help="0.11.2 or later")
    parser.add_argument(
        "--blocks", type=int, default=400_000, help="of D's layers, and P's like it"
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--rows", default="", help="numbers of rows, by commas; all by default")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {MOST}")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        row = play(Row(**json.loads(options.play)), options.blocks, options.layers)
        print(_ANSWER + json.dumps(asdict(row)), flush=True)
        os._exit(0)  # the listeners' threads look up once a second
    fetch([options.release])
    chosen = {0, *(int(number) for number in options.rows.split(",") if number)}
    wanted = [r for i, r in enumerate(ROWS) if not options.rows or i in chosen]
    # A table in a file is as wide as it is.
    console, rows = Console(width=None if sys.stdout.isatty() else 120), []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for row in wanted:
            progress.update(task, description=row.name)
            rows.append(measure(options.release, row, options.blocks, options.layers))
            progress.advance(task)
    title = (
        f"vLLM {options.release}, {options.layers} layers of {options.blocks:,} blocks of 16 tokens"
    )
    show(rows, title, console)
    if options.json:
        told = {"release": options.release, "blocks": options.blocks, "layers": options.layers}
        options.json.write_text(
            json.dumps(told | {"rows": [asdict(row) for row in rows]}, indent=2)
        )
    over = missed(rows)
    console.print("\n".join(over) or f"all within {MOST} of stock's like pair")
    return int(bool(over) and options.check)


if __name__ == "__main__":
    sys.exit(main())
