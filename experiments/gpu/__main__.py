"""Plays stages on a GPU, each bounded in time, and puts what they find into one file.

    experiments/gpu/run.sh [--device cpu] [--seconds 540] [STAGE ...]

Without names all are played, those first that matter most. A stage that fails, or has no time left,
keeps no other from being played. What stages say is in $OUT/logs.tar.gz. `--publish FILE ...`
brings such files into docs/data instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu.rows import LABEL
from tests.played import write_table

_ROOT = Path(__file__).resolve().parents[2]
_RELEASES = ("0.33.0", "0.32.0", "0.28.0")
_NOT_PLAYED = "not played on a GPU yet"


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        shows: in the words of the page.
        seconds: that it may take on a GPU.
        commands: run at once; each gets --device and --json.
    """

    shows: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]


def _own(name: str, *more: str) -> tuple[str, ...]:
    return ("-m", f"experiments.gpu.{name}", *more)


def _bench(name: str, *more: str) -> tuple[str, ...]:
    return (f"experiments/bench_{name}.py", *more)


_PAIRS = tuple(_own("pairs", "--release", release) for release in _RELEASES)
_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/transfer")
_READS = _bench("transfer", "--mib", "64", "--repeat", "5", "--pairs", "0,1,4,6")
#: In the order of their worth.
STAGES = {
    "machine": Stage("the machine", 60, (_own("machine"),)),
    "workers": Stage("`kvpatch verify --device`: two workers' bytes", 90, (_own("workers"),)),
    "pairs": Stage("real connectors of three releases, off and on; a flipped bit", 200, _PAIRS),
    "tests": Stage("the project's own tests of a device, `pytest -m gpu`", 120, (_TESTS,)),
    "placing": Stage("out of the staging pool, beside a device's copy", 60, (_own("placing"),)),
    "connectors": Stage("real connectors beside stock's like pair", 150, (_own("connectors"),)),
    "reads": Stage("direct, staged, stock's like reads, a device's copy", 120, (_READS,)),
    "runs": Stage("raw NIXL by the size of a run", 60, (_bench("runs", "--mib", "256"),)),
    "host": Stage("saves to pinned host buffers", 60, (_bench("host_pool", "--repeat", "5"),)),
    "digests": Stage("digests beside a device's copy", 60, (_bench("digest", "--mib", "256"),)),
    "engines": Stage("real engines: tokens, time to the first", 300, (_own("engines"),)),
}
#: Smaller sizes for a dry run.
_DRY = {"reads": ("--mib", "16", "--repeat", "1"), "runs": ("--mib", "4"), "host": ("--mib", "8"),
        "digests": ("--mib", "16"), "placing": ("--tokens", "200")}  # fmt: skip


def play(name: str, device: str, seconds: float, out: Path) -> dict[str, Any]:
    """Runs a stage's commands at once; returns their rows, and what went wrong."""
    began = time.monotonic()
    running = []
    for number, command in enumerate(STAGES[name].commands):
        rows, log = (out / f"{name}-{number}.{kind}" for kind in ("json", "log"))
        rows.unlink(missing_ok=True)
        more = () if "pytest" in command else ("--device", device, "--json", str(rows))
        more += _DRY.get(name, ()) if device == "cpu" else ()
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *command, *more],
                cwd=_ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it has started holds memory of the GPU
            )
        running.append((process, rows, log))
    found: dict[str, Any] = {"rows": [], "errors": []}
    for process, rows, log in running:
        try:
            process.wait(max(1.0, began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            found["errors"].append(f"stopped after {seconds:.0f} s")
        tail = log.read_text(errors="replace")[-2000:]
        if process.returncode and process.returncode > 0:
            found["errors"].append(f"exit {process.returncode}: {tail}")
        if rows.exists():
            found["rows"] += json.loads(rows.read_text())
        elif process.returncode == 0:
            found["rows"].append({LABEL: (tail.strip().splitlines() or ["no word"])[-1]})
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def said(stage: dict[str, Any]) -> str:
    """Returns a table's words about a stage."""
    rows = stage["rows"]
    judged = [row["is_right"] for row in rows if "is_right" in row]
    found = str(rows[0][LABEL]) if len(rows) == 1 else f"{len(rows)} rows"
    parts = [f"{sum(judged)} of {len(judged)} right" if judged else found]
    parts += [f"{key} {min(found):.2f} to {max(found):.2f}" for key, found in _figures(rows)]
    return "; ".join([*parts, *(error.splitlines()[0][:120] for error in stage["errors"])])


def _figures(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    keys = {"gb_per_second": "GB/s", "of_like": "of the like pair", "of_copy": "of a copy",
            "of_like_p": "of stock's like read", "first_ms": "first token, ms"}  # fmt: skip
    found = [(text, [row[key] for row in rows if key in row]) for key, text in keys.items()]
    return [(text, values) for text, values in found if values]


def publish(paths: Sequence[Path]) -> None:
    """Writes docs/data/gpu.json: a row a stage, and those that were not played say so."""
    played: dict[str, Any] = {}
    for path in paths:
        found = json.loads(path.read_text())
        if found["device"] != "cuda":
            raise SystemExit(f"{path} is of a dry run: the page is for a GPU's results")
        played |= found["stages"]
    machine = next(iter(played.get("machine", {}).get("rows", ())), {})
    rows = [
        [
            f"`{name}`",
            stage.shows,
            said(played[name]) if name in played else _NOT_PLAYED,
        ]
        for name, stage in STAGES.items()
    ]
    note = f"{machine['name']}, torch {machine['torch']}." if machine else ""
    columns = ("stage", "what it shows", "result")
    write_table(_ROOT / "docs/data/gpu.json", "experiments/gpu/run.sh", "", note, columns, rows)


def main() -> None:
    """Plays, or publishes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []], help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540, help="of all stages together")
    parser.add_argument("--scale", type=float, default=1, help="of each stage's own limit")
    parser.add_argument("--publish", type=Path, nargs="*", help="write docs/data/gpu.json of these")
    options = parser.parse_args()
    if options.publish is not None:
        publish(options.publish)
        return
    out = Path(os.environ["OUT"])
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if (earlier := logs.with_suffix(".tar.gz")).exists():
        shutil.unpack_archive(earlier, logs, filter="data")
    path = out / "gpu.json"
    end = time.monotonic() + options.seconds
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if found.get("device") != options.device:
        found = {"device": options.device, "stages": {}}
    for name in options.stages or STAGES:
        left = end - time.monotonic()
        if left < 15:
            print(f"{name}: no time is left", flush=True)
            continue
        limit = min(left, options.scale * STAGES[name].seconds)
        found["stages"][name] = stage = play(name, options.device, limit, logs)
        path.write_text(json.dumps(found, indent=1))
        print(
            f"{name} ({stage['seconds']} s): {said(stage)}", *stage["errors"], sep="\n", flush=True
        )
    shutil.make_archive(str(logs), "gztar", logs)  # in one file, where few come back
    shutil.rmtree(logs)


if __name__ == "__main__":
    main()
