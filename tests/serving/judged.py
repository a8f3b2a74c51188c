"""What the records of a run say, read from themselves and not from its exit status."""

from __future__ import annotations

from typing import Any

from kvpatch.verify.prompts import CONTROL_TOKENS

PROMPTS = 23


def require_identical(records: list[dict[str, Any]], layers: int, prompts: int = PROMPTS) -> None:
    """What the exit status says, read from the records themselves."""
    assert sum(not record["control"] for record in records) == prompts
    assert sum(record["control"] for record in records) == len(CONTROL_TOKENS)
    for record in records:
        single, observed = record["setups"]["single"], record["setups"]["kvpatch"]
        same_tokens = observed["completion"]["token_ids"] == single["completion"]["token_ids"]
        same_cache = observed["prefill"]["fingerprints"] == observed["decode"]["fingerprints"]
        assert same_tokens is same_cache is not record["control"], record["case"]
        assert len(observed["decode"]["fingerprints"]) == layers
        assert observed["decode"]["computed_tokens"] == record["prompt_tokens"] - 1
