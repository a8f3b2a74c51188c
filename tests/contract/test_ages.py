"""Results that are older than the code are named, in the warnings of a run.

That fails nothing: results take hours to play, and most commits change none of them. Results of a
commit that nobody has are named too.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from . import ages

pytestmark = pytest.mark.contract


class OldResults(UserWarning):
    """The code has changed since results were played."""


@pytest.mark.parametrize("age", list(ages.ages()), ids=lambda age: age.name)
def test_results_are_of_this_code(age: ages.Age) -> None:
    if age.commits != 0:
        warnings.warn(str(age), OldResults, stacklevel=1)


def test_an_old_and_an_unknown_commit_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ages, "DATA", tmp_path)
    run = {"made_by": "x", "date": "2026-01-01"}
    (tmp_path / "new.json").write_text(json.dumps(run | {"commit": "HEAD"}))
    rows = {"0.1": run | {"commit": "HEAD"}, "0.2": run | {"commit": "0" * 40}}
    (tmp_path / "old.json").write_text(json.dumps({"made_by": "x", "releases": rows}))

    new, old = ages.ages()

    assert (new.commits, old.commits) == (0, None)
    assert "is not known here" in str(old)
