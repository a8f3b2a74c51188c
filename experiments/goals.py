"""What a benchmark is to reach, beside what it found: one table for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """One number of a run; ``is_least`` where it has to be at least what is wanted."""

    name: str
    found: float
    wanted: float
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.found >= self.wanted if self.is_least else self.found <= self.wanted


def are_met(goals: Sequence[Goal], console: Console) -> bool:
    """Prints goal beside result; whether all are met."""
    table = Table("goal", "wanted", "found", "")
    for goal in goals:
        sign = ">=" if goal.is_least else "<="
        word = "met" if goal.is_met else "missed"
        table.add_row(goal.name, f"{sign} {goal.wanted:g}", f"{goal.found:.2f}", word)
    console.print(table)
    return all(goal.is_met for goal in goals)
