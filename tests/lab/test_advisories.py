"""vLLM's advisories of its KV transfer parameters: what docs/data says of a release is so."""

from __future__ import annotations

import pytest

from . import advisories
from .host import Lab

pytestmark = pytest.mark.lab


def test_stock_is_as_recorded_and_no_engine_with_kvpatch_ends(lab: Lab) -> None:
    found = advisories.play(lab)

    assert found.kvpatch == advisories.SURVIVES
    assert found == advisories.known().get(lab.release, found)
