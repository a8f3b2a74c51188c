"""Draws how planning grows with a prompt, from what bench_growth.py has written.

python experiments/bench_growth.py --json growth.json
python experiments/draw_growth.py growth.json docs/pictures/growth.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_MIB = 1024**2


def main() -> None:
    """Reads the first path and writes the second."""
    source, target = map(Path, sys.argv[1:])
    prompts = json.loads(source.read_text())["prompts"]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for way, color in (("staged", "tab:blue"), ("direct", "tab:orange")):
        rows = [row for row in prompts if row["way"] == way]
        tokens = [row["tokens"] for row in rows]
        time.plot(tokens, [row["all_seconds"] * 1e3 for row in rows], "o-", color=color, label=way)
        if way == "staged":
            first = [row["first_seconds"] * 1e3 for row in rows]
            time.plot(tokens, first, "o:", color=color, label="staged, to its first chunk")
        memory.plot(tokens, [row["peak_bytes"] / _MIB for row in rows], "o-", color=color)
    linear = [tokens[0], tokens[-1]]
    time.plot(linear, [0.2, 0.2 * linear[1] / linear[0]], color="0.7", zorder=0, label="linear")
    for axes, title in ((time, "planning, ms"), (memory, "held at the peak, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", title=title)
        axes.grid(alpha=0.3)
    time.legend(fontsize="small")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
