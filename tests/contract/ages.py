"""Which results are older than the code that they speak of, by git."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from .tables import DATA, ROOT

#: What results depend on. Commands and a run's own plumbing change none.
_CODE = ("kvpatch", ":(exclude)kvpatch/tools")


@dataclass(frozen=True)
class Age:
    """Of one file of results, by its oldest ones.

    Attributes:
        commits: to the code since then; None where git does not know the commit.
    """

    name: str
    commit: str
    commits: int | None

    def __str__(self) -> str:
        if self.commits is None:
            return f"docs/data/{self.name}.json: commit {self.commit} is not known here"
        return f"docs/data/{self.name}.json: {self.commits} commits to the code since {self.commit}"


def ages() -> Iterator[Age]:
    """One for each file."""
    for path in sorted(DATA.glob("*.json")):
        data = json.loads(path.read_text())
        commits = {row["commit"].rstrip("+") for row in data.get("releases", {"": data}).values()}
        found = [Age(path.stem, commit, _commits_since(commit)) for commit in sorted(commits)]
        yield max(found, key=lambda age: float("inf") if age.commits is None else age.commits)


def _commits_since(commit: str) -> int | None:
    known = subprocess.run(
        ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *_CODE],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return int(known.stdout) if known.returncode == 0 else None
