"""docs/reference/metrics.md: every metric, as the code that shows it has it."""

from __future__ import annotations

from kvpatch.core.releases import FACTS
from kvpatch.observe.catalogue import HOST_BLOCKS, METRICS, Metric

from .dashboard import QUESTIONS
from .tables import ROOT, markdown

PAGE = ROOT / "docs" / "reference" / "metrics.md"

_HEAD = """\
# Metrics

What does kvpatch count? Its metrics are in `/metrics` of the API server next to vLLM's own
(`vllm:nixl_...`), with vLLM's labels (`model_name`, `engine`) and at most one more. They need
`ENABLE_KVPATCH` in the API server's process too; `KVPATCH_DISABLE=metrics` turns them off.
Written by `python -m tests.contract --write` from the code.

"""
_TAIL = """
## How to read them

Workers count, and vLLM's own statistics of the connector carry the counts: from a step to the scheduler,
and with the step's answers to the API server. So an engine at rest shows what happened after its next step.
A gauge has the value of the last step in which it changed.

| word | meaning |
| --- | --- |
| read | one of vLLM's transfers: one for each rank of P that a worker reads from. In push mode P counts what it writes, as `stock`. A read that NIXL does not count is not counted |
| load | a request, once for each worker of D that is to load it, with one outcome |
| `received` | the sum of `held` and `unproven` |
| `failed` | D computes it or ends the request, by `kv_load_failure_policy`. Digests that differ count here; D computes those, unless `KVPATCH_ON_FAILED_CHECK=fail` |
| `stale` | the sum of `gone` and `expired`; D computes it, as above ([stale blocks](../explanation/stale_blocks.md)) |
| `held` | P stated after the last byte that it held the blocks |
| `gone` | P stated that it had given them away |
| `expired` | P states nothing, and its lease must have ended before the last byte |
| `unproven` | received, and P states nothing |
| `way` | `stock`: read by vLLM; `direct`: straight to its place; `staged`: at least in part through the staging pool; `host_buffer`: through a pool in host memory |
| `cause` | the class of the error ([refusals](refusals.md) has the sentences), once for each request and worker. A repeated handshake is refused again |
| `rank` | the worker's in its engine |

A request that its client aborts may count too. The [log](log_lines.md) says what failed, and what to do.

## Questions

[A dashboard for Grafana](dashboard.json) asks them (Dashboards, New, Import). A test holds
its queries against the metrics. Grafana itself has not been tried.

"""  # noqa: E501


def page() -> str:
    """The whole document."""
    rows = [_row(metric) for metric in METRICS]
    table = markdown(("metric", "kind", "label", "meaning", "from"), rows)
    questions = [(question.asks, f"`{question.plain}`") for question in QUESTIONS]
    return _HEAD + table + _TAIL + markdown(("question", "query"), questions) + _since()


def _row(metric: Metric) -> tuple[str, ...]:
    values = ", ".join(f"`{value}`" for value in metric.values)
    label = f"`{metric.label}`" + (f": {values}" if values else "") if metric.label else ""
    if metric.label == "cause":
        label += ", ..."
    return (f"`{metric.shown_name}`", metric.kind, label, metric.meaning, _first(metric))


def _first(metric: Metric) -> str:
    """The first release that shows it."""
    return next(
        facts.release
        for facts in FACTS.values()
        if facts.stats is not None
        and (facts.asks_scheduler_for_stats or not metric.is_of_scheduler)
    )


def _since() -> str:
    without = [facts.release for facts in FACTS.values() if facts.stats is None]
    return (
        f"\n## Old releases\n\n`<= {without[-1]}` have no metrics of the connector: read the "
        "[log](log_lines.md). Counts of schedulers (P's host buffer, refused parameters, requests "
        f"that never fit the host buffer) are shown from {_first(HOST_BLOCKS)} on.\n"
    )
