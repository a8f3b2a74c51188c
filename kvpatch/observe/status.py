"""The record of what kvpatch did in this process, as data: for logs, ``doctor`` and tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: ``waiting`` is no outcome: the connector has not been imported in this process.
Outcome = Literal["applied", "not needed", "off", "refused", "waiting"]


@dataclass(frozen=True)
class PatchStatus:
    """The outcome of one patch and, unless it was applied, why."""

    slug: str
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.slug} ({self.reason})" if self.reason else self.slug


@dataclass(frozen=True)
class Status:
    """The whole picture of one process.

    Attributes:
        enabled: whether :func:`kvpatch.enable` has been called and not undone.
        vllm: the distribution and its version, or None when there is none.
        generation: the generation's slug, or None when it is not known.
        problem: why nothing can be applied at all, or empty.
        patches: a row per patch, in the order in which they are applied.
    """

    kvpatch: str
    enabled: bool
    vllm: str | None
    generation: str | None
    problem: str
    patches: tuple[PatchStatus, ...]

    @property
    def refused(self) -> bool:
        """True if something that is enabled cannot be applied."""
        return bool(self.problem) or any(p.outcome == "refused" for p in self.patches)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """Returns a line for the log: what was applied, what not, and why."""
        head = (
            f"kvpatch {self.kvpatch} on {self.vllm or 'no vLLM'} ({self.generation or 'unknown'})"
        )
        if self.problem:
            return f"{head}: refused: {self.problem}"
        parts = []
        for outcome in ("applied", "refused", "off", "not needed", "waiting"):
            rows = [p for p in self.patches if p.outcome == outcome]
            if rows:
                parts.append(f"{outcome}: {', '.join(map(str, rows))}")
        return f"{head}: {'; '.join(parts)}"
