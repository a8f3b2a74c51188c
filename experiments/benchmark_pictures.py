"""Pictures of what the benchmarks write with --json."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib
from benchmark_tables import Raw

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLORS = ("0.6", "tab:orange", "tab:blue")


def transfer(raw: Raw, target: Path) -> None:
    """Bars for each pair."""
    pairs = list(dict.fromkeys(row["pair"] for row in raw))
    speed = {(row["pair"], row["way"].removesuffix(" (auto)")): row for row in raw}
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    ways = (("stock, both like P", "stock, between like engines"), ("direct",) * 2, ("staged",) * 2)
    for number, (way, label) in enumerate(ways):
        found = [speed[pair, way] for pair in pairs]
        places = [at + 0.27 * (number - 1) for at in range(len(pairs))]
        bars = axes.bar(places, [row["gb_per_second"] for row in found], 0.25, label=label,
                        color=_COLORS[number])  # fmt: skip
        for bar, row in zip(bars, found, strict=True):
            if row["way"].endswith("(auto)"):
                axes.annotate("▾", (bar.get_x() + bar.get_width() / 2, bar.get_height()),
                              ha="center")  # fmt: skip
    axes.set_xticks(range(len(pairs)), [pair.replace(" -> ", "\n→ ") for pair in pairs], fontsize=6)
    axes.set(ylabel="GB/s", title="128 MiB in scattered blocks; ▾ the way that is chosen")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.legend(fontsize="small", ncols=3, loc="upper center")
    figure.savefig(target, dpi=110)
    plt.close(figure)


def serving(raw: Raw, target: Path) -> None:
    """Time to first token of each pair as a share of the like pair's, prompt by prompt."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    shares, names = [], []
    for pair in raw:
        for when in ("idle", "busy"):
            loads = pair[when]
            shares.append([load["first_token_s"] / load["like_first_token_s"] for load in loads])
            names.append(f"{pair['pair']}\n{when}")
    axes.boxplot(shares, tick_labels=names, showfliers=False, whis=(5, 95))
    axes.axhline(1, color="0.6", zorder=0)
    axes.axhline(1.2, color="tab:red", lw=0.8, ls=":", zorder=0)
    middle = statistics.median(share for each in shares for share in each)
    axes.set(ylabel="of the like pair's time", ylim=(0, max(2.0, 2 * middle)))
    axes.set_title("time to first token, beside stock's like pair")
    axes.tick_params(axis="x", labelsize=7)
    figure.savefig(target, dpi=110)
    plt.close(figure)


PICTURES: dict[str, Callable[[Raw, Path], None]] = {
    drawn.__name__: drawn for drawn in (transfer, serving)
}
