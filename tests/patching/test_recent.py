"""What is kept of engines that come and go."""

from __future__ import annotations

from kvpatch.core.recent_engines import MOST_ENGINES, RecentEngines


def test_the_oldest_is_forgotten_and_the_last_booked_is_not():
    found = RecentEngines[int]()
    for number in range(MOST_ENGINES):
        found[f"e{number}"] = number
    found["e0"] = 7
    found["new"] = 8

    assert len(found) == MOST_ENGINES
    assert "e1" not in found
    assert (found["e0"], found["new"]) == (7, 8)
