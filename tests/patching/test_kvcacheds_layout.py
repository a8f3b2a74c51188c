"""What the connector asks vLLM for with kvcached active."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kvpatch.core.releases import FACTS
from kvpatch.patches.kvcached_layout import PATCH

_ASKED = [facts for facts in FACTS.values() if PATCH.sites(facts)]


@pytest.mark.parametrize("is_kvcacheds", [True, False])
@pytest.mark.parametrize("facts", _ASKED, ids=lambda facts: facts.release)
def test_the_connectors_wish_holds_where_vllm_makes_the_views(facts, is_kvcacheds, monkeypatch):
    monkeypatch.setenv("ENABLE_KVCACHED", "true" if is_kvcacheds else "false")
    (ask,) = PATCH.sites(facts).values()

    found = ask(lambda config: "HND", None, None)

    by_vllm = Version(facts.release) >= Version("0.29")
    assert found == ("HND" if by_vllm or not is_kvcacheds else None)
