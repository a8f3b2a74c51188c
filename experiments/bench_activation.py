"""What kvpatch costs a process: the entry point when it is off, ``enable()`` when it is on.

    python experiments/bench_activation.py [--runs 21]

Every run is a fresh interpreter; medians are printed. "beyond wrapt" and
"beyond vLLM's own imports" start from a process that has those already, as a
process of vLLM has when it loads its plugins.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

_TIMED = """
import time
{before}
start = time.perf_counter()
{timed}
print(time.perf_counter() - start)
"""

_OFF = "from kvpatch.plugin import load\nload()"
_ON = "import kvpatch\nkvpatch.enable()"
# What every process of vLLM has imported when it loads plugins, of what kvpatch uses.
_OF_VLLM = "import dataclasses, inspect, logging, importlib.metadata, packaging.version, wrapt"

_CASES = (
    ("entry point, off", "", _OFF, 1.0),
    ("enable(), beyond wrapt", "import wrapt", _ON, 20.0),
    ("enable(), beyond vLLM's own imports", _OF_VLLM, _ON, 20.0),
)


def main() -> None:
    """Prints a row per case: median, goal, and whether it is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    table = Table("case", "median ms", "goal ms", "met", title=f"{runs} fresh processes each")
    for name, before, timed, goal_ms in _CASES:
        script = _TIMED.format(before=before, timed=timed)
        found = [_once(script) * 1e3 for _ in track(range(runs), name, transient=True)]
        median_ms = statistics.median(found)
        met = "yes" if median_ms < goal_ms else "no"
        table.add_row(name, f"{median_ms:.2f}", f"{goal_ms:g}", met)
    Console().print(table)


def _once(script: str) -> float:
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if answer.returncode != 0:
        raise SystemExit(answer.stderr)
    return float(answer.stdout)


if __name__ == "__main__":
    main()
