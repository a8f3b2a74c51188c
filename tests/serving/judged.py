"""What the records of a run say, read from themselves and not from its exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpatch.tools.verify.model import CONTROL_TOKENS

PROMPTS = 23


def require_identical(records: list[dict[str, Any]], prompts: int = PROMPTS) -> None:
    """What the exit status says, read from the records themselves."""
    assert sum(not record["control"] for record in records) == prompts
    assert sum(record["control"] for record in records) == len(CONTROL_TOKENS)
    for record in records:
        single, observed = record["setups"]["single"], record["setups"]["kvpatch"]
        same_tokens = observed["completion"]["token_ids"] == single["completion"]["token_ids"]
        same_cache = observed["prefill"]["fingerprints"] == observed["decode"]["fingerprints"]
        assert same_tokens is same_cache is not record["control"], record["case"]
        assert len(observed["decode"]["fingerprints"]) == 4, "layers"
        assert observed["decode"]["computed_tokens"] == record["prompt_tokens"] - 1


def metrics_of(work_dir: Path, engine: str) -> dict[str, float]:
    """What an engine showed when its row was over, by name and by the value of its own label."""
    from prometheus_client.parser import text_string_to_metric_families  # with vLLM it is there

    text = (work_dir / f"{engine}.metrics").read_text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [v for label, v in sample.labels.items() if label not in ("model_name", "engine")]
            if sample.name.startswith(("kvpatch_", "vllm:nixl_")):
                found[" ".join((sample.name, *own))] = sample.value
    return found


WAYS = frozenset(("stock", "direct", "staged", "host_buffer"))


def require_metrics(
    work_dir: Path, row: str, records: list[dict[str, Any]], *ways: str
) -> dict[str, float]:
    """D's own account of a row: all loads came, by these ways alone, and NIXL counted as much.

    Returns:
        All of it.
    """
    shown = metrics_of(work_dir, f"{row}-decode-kvpatch")

    assert shown["kvpatch_loads_total received"] >= len(records), shown
    assert shown["kvpatch_loads_total failed"] == shown["kvpatch_loads_total stale"] == 0, shown
    proven, unproven = (shown[f"kvpatch_load_holds_total {hold}"] for hold in ("held", "unproven"))
    assert proven + unproven == shown["kvpatch_loads_total received"], shown
    assert {shown[f"kvpatch_reads_total {way}"] for way in WAYS.difference(ways)} <= {0}, shown
    reads, size_bytes = (
        sum(shown[f"kvpatch_{name}_total {way}"] for way in ways)
        for name in ("reads", "read_bytes")
    )
    # Of a prompt that D has whole nothing is read.
    assert 0 < reads <= shown["kvpatch_loads_total received"], shown
    assert reads == shown["vllm:nixl_xfer_time_seconds_count"], shown
    assert size_bytes == shown["vllm:nixl_bytes_transferred_sum"], shown
    # A like peer alone needs no staging pool.
    has_pool = shown.get("kvpatch_staging_pool_bytes 0", 0) > 0
    assert has_pool == (set(ways) != {"stock"}), shown
    return shown
