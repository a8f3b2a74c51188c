"""What the connector asks vLLM for with kvcached active."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kvpatch._versions import GENERATIONS
from kvpatch.patches.kvcached_layout import PATCH

pytestmark = pytest.mark.patching

_ASKED = [generation for generation in GENERATIONS if generation.slug in PATCH.sites]


@pytest.mark.parametrize("is_kvcacheds", [True, False])
@pytest.mark.parametrize("generation", _ASKED, ids=lambda generation: generation.slug)
def test_the_connectors_wish_holds_where_vllm_makes_the_views(
    generation, is_kvcacheds, monkeypatch
):
    monkeypatch.setenv("ENABLE_KVCACHED", "true" if is_kvcacheds else "false")
    (ask,) = PATCH.sites[generation.slug].values()

    found = ask(lambda config: "HND", None, (None,), {})

    by_vllm = Version(generation.releases[0]) >= Version("0.29")
    assert found == ("HND" if by_vllm or not is_kvcacheds else None)
