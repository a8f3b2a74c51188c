"""What it costs P to state a prompt's hashes, and D to compare its own with them.

    python experiments/bench_prompt.py [--check] [--json FILE]

The least of some rounds. "copies of the list": as many copies of the list of ids take
as long as the slower side. vLLM makes several for each request.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.goals import Goal, add_options, conclude, console_of
from kvpatch.load.stated_prompt import FIELD, read_prompt, state_prompt

_TOKENS = (1_000, 8_000, 32_000)
_ROUNDS = 50
_MOST_MS = 1.0
_WIDTH = 100


def _least_ms(made: Callable[[], object]) -> float:
    found = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        made()
        found.append(time.perf_counter() - started)
    return 1e3 * min(found)


def _request(tokens: int) -> Any:
    """Fake: of vLLM's request what is looked at."""
    ids = [random.randrange(150_000) for _ in range(tokens)]
    return SimpleNamespace(
        prompt_token_ids=ids, mm_features=[], lora_request=None, output_token_ids=[]
    )


@dataclass(frozen=True)
class Row:
    """One length of prompt."""

    tokens: int
    state_ms: float
    compare_ms: float
    copies: float
    text_bytes: int


def _row(tokens: int) -> Row:
    request = _request(tokens)
    text = str(state_prompt(request, tokens, names_images=True))

    def compare() -> int | None:
        stated = read_prompt({FIELD: text})
        return None if stated is None else stated.common_tokens(request, names_images=True)

    if compare() != tokens:
        raise RuntimeError(f"{tokens} tokens are not found to be the same")
    state_ms = _least_ms(lambda: str(state_prompt(request, tokens, names_images=True)))
    compare_ms, copy_ms = _least_ms(compare), _least_ms(request.prompt_token_ids.copy)
    return Row(tokens, state_ms, compare_ms, max(state_ms, compare_ms) / copy_ms, len(text))


def main() -> None:
    """Times all lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    options = parser.parse_args()
    rows = [_row(tokens) for tokens in _TOKENS]
    table = Table("tokens", "state, ms", "compare, ms", "copies of the list", "text, bytes")
    for row in rows:
        figures = f"{row.state_ms:.2f}", f"{row.compare_ms:.2f}", f"{row.copies:.0f}"
        table.add_row(str(row.tokens), *figures, str(row.text_bytes))
    console = console_of(_WIDTH)
    console.print(table)
    longest = rows[-1]
    most_ms = max(longest.state_ms, longest.compare_ms)
    conclude(rows, [Goal("ms on each side, 32,000 tokens", most_ms, _MOST_MS)], options, console)


if __name__ == "__main__":
    main()
