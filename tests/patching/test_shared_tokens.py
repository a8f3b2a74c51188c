"""Which prompts D loads where its ranks share out the tokens of a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core.releases import FACTS
from kvpatch.load.common_prompt import may_load

pytestmark = pytest.mark.patching

_TOKENS = 100


def _scheduler(ranks: int) -> Any:
    """Fake: of the connector's scheduler half what is looked at."""
    sizes = {"decode_context_parallel_size": ranks, "prefill_context_parallel_size": 1}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes))
    return SimpleNamespace(vllm_config=config, block_size=16)


def _request(blocks: int) -> Any:
    params = {
        "remote_engine_id": "P",
        "remote_block_ids": [list(range(blocks))],
        "remote_num_tokens": _TOKENS,
    }
    return SimpleNamespace(kv_transfer_params=params, request_id="r", num_prompt_tokens=_TOKENS)


@pytest.mark.parametrize(
    ("release", "ranks", "blocks", "is_loaded"),
    [
        ("0.28.0", 1, 7, True),
        ("0.28.0", 2, 4, True),
        ("0.28.0", 2, 7, False),
        ("0.29.0", 2, 7, True),
        ("0.33.0", 2, 7, True),
    ],
)
def test_lists_tell_where_no_handshake_does(
    release: str, ranks: int, blocks: int, is_loaded: bool
) -> None:  # noqa: FBT001
    """From 0.29 on the release knows the sizes of both sides, and pairs unlike ones."""
    assert may_load(_scheduler(ranks), _request(blocks), FACTS[release]) is is_loaded
