"""Loads that verify themselves, proven on real engines: experiments/proof.sh runs this.

vLLM's servers on the CPU, with a tiny random Llama or with ``--model``:

``good``      thousands of good loads, eight at once: nothing may be called stale, wrong or strange.
``faults``    wrong bytes on purpose, fault by fault: who notices them, are the answers behind those
              that were noticed the single engine's, as they are streamed, and are those behind the
              others other ones? Once before digests are compared, and once behind them, for the
              witness alone.
``lease``     P's lease of 2 s ends while D is held up, and others' prompts take the blocks.
``cost``      time to first token of a like pair with each instrument, beside a stock pair by turns.
``switched``  the same within one pair, of loads that an instrument looks at and others.
``clocked``   what instruments take of it, by a clock around what they do for a load.

Wrong bytes are put there by a probe in the engines' workers (``engines/proof_probe.py``) between a
load's last byte and whoever looks at it first. With --check the exit status is 1 where a goal is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.engines.checkout import importable_in_engines
from experiments.engines.fault_loads import LENGTHS
from experiments.engines.prompt_tokens import excerpts_of
from experiments.engines.proof_pairs import PAIRS
from experiments.goals import add_options, conclude, console_of
from experiments.options import chosen, work_folder
from experiments.proof_shown import goals
from experiments.proof_stages import DTYPES, STAGES, Asking, Run, play
from kvpatch.core.errors import KvpatchError
from kvpatch.verify.model import make_tiny_llama
from kvpatch.verify.run import until_signal
from kvpatch.verify.setups import Options


def main() -> None:
    """Plays what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [pair.name for pair in PAIRS]
    parser.add_argument("--stages", help="by commas: " + ", ".join(STAGES))
    parser.add_argument("--pairs", help="by commas: " + ", ".join(names))
    parser.add_argument("--dtypes", help="by commas: " + ", ".join(DTYPES))
    parser.add_argument("--loads", type=int, default=2000, help="good ones of each pair and type")
    parser.add_argument("--each", type=int, default=100, help="loads of each fault")
    parser.add_argument(
        "--longest",
        type=int,
        default=900,
        choices=[255, 511, 900],
        help="tokens of a fault's prompt",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="of good loads of each pair")
    parser.add_argument("--quick", action="store_true", help="sizes of minutes; one pair, one type")
    parser.add_argument("--model", type=Path, help="a folder with another model than the tiny one")
    parser.add_argument(
        "--text", type=Path, help="prompts are excerpts of it, and not words in any order"
    )
    parser.add_argument("--work-dir", type=Path, help="for logs and the model; kept")
    add_options(parser)
    options = parser.parse_args()
    console = console_of(190)
    importable_in_engines()
    try:
        if options.quick:
            options.loads, options.each = min(options.loads, 120), min(options.each, 6)
            options.pairs, options.dtypes = options.pairs or names[0], options.dtypes or DTYPES[0]
        wanted_pairs = chosen(options.pairs, names, "--pairs")
        folder = work_folder(options.work_dir, "proof", console)
        model = str(options.model.resolve() if options.model else make_tiny_llama(folder / "model"))
        asking = Asking(
            chosen(options.stages, STAGES, "--stages"),
            [pair for pair in PAIRS if pair.name in wanted_pairs],
            chosen(options.dtypes, DTYPES, "--dtypes"),
            model,
            options.model.resolve().name if options.model else "tiny Llama",
            options.loads,
            options.each,
            options.seconds,
            [lengths for lengths in LENGTHS if lengths[1] <= options.longest],
            excerpts_of(options.text, model, options.longest) if options.text else None,
        )
        of_run = Options(work_dir=folder, model=model, startup_timeout_s=900.0)

        def keep(rows: Sequence[Any]) -> None:
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))

        rows = until_signal(play(Run(asking, of_run, console, keep)))
    except KvpatchError as error:
        parser.exit(2, f"error: {error}\n")
    conclude(rows, goals(rows), options, console)


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    main()
