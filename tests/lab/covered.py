"""What of the lab a run covers, in a sentence: ``python -m tests.lab.covered``."""

from __future__ import annotations

from .releases import newest, plays_all, selected
from .selection import share


def covered() -> str:
    """By the variables that steer a run."""
    releases, part = selected(), share()
    if len(releases) == 1:
        return f"{releases[0]} whole"
    if part is None:
        span = f"{len(releases)} releases from {releases[0]} to {releases[-1]}"
        return f"all of {span}" if plays_all() else f"all of {', '.join(releases)}"
    return (
        f"{newest()} whole; of {', '.join(releases)} what is marked every_release, and of the rest "
        f"share {part}. The same again: KVPATCH_TEST_SHARE={part}; all of it: tests/run.sh --full"
    )


if __name__ == "__main__":
    print(covered())
