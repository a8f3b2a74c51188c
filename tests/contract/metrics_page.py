"""docs/reference/metrics.md: every metric, as the code that shows it has it."""

from __future__ import annotations

from kvpatch.core.releases import FACTS
from kvpatch.observe.catalogue import HOST_BLOCKS, METRICS, Metric

from .dashboard import QUESTIONS
from .tables import ROOT, markdown

PAGE = ROOT / "docs" / "reference" / "metrics.md"

_HEAD = """\
# Metrics

Written by `python -m tests.contract --write` from the metrics that the code makes.

They stand in `/metrics` of the API server next to vLLM's own (`vllm:nixl_...`), with vLLM's labels
(`model_name`, `engine`) and at most one more. They need `ENABLE_KVPATCH` in the API server's
process too; `KVPATCH_DISABLE=metrics` leaves them out.

"""
_TAIL = """
## How they come there

Workers count, and what they have counted travels with vLLM's own statistics of the connector: in the
output of a step to the scheduler, which adds up its workers', and with the step's answers to the API
server. What happens while an engine rests, a refused handshake say, is shown after its next step.
A gauge is what it was after the last step in which it changed.

- A **read** is one of vLLM's transfers: one from each rank of P that a worker reads from. In push
  mode, where P writes, P counts what it has written as `stock`.
- A read of which NIXL counts nothing is in none of the three, as in vLLM's own.
- A **load** is a request, counted by each worker of D that was to load it: two ranks count two.
  Each counts once, in one outcome, whatever failed of it, a refused handshake included. `failed` is
  computed by D or ends its request, by vLLM's `kv_load_failure_policy`; `stale`, and `failed` of loads that
  digests found wrong, is computed by D, or by the policy with `KVPATCH_ON_FAILED_CHECK=fail`. A request that
  its client has given up may count too.
- `stale` and `hold`: see [Blocks gone stale](../explanation/stale_blocks.md). `held`: P has said after the
  last byte that it held the blocks. `gone`: P has said that it had let go of them. `expired`: P says
  nothing, and its lease must have run out before the last byte. `unproven`: received, and nobody has
  said anything. `received` is `held` and `unproven`; `stale` is `gone` and `expired`.
- `way`: `stock` is read by vLLM itself, `direct` goes straight to its place, `staged` goes in part or
  in whole through the staging pool, `host_buffer` through a pool in host memory.
- What failed, and what to do about it, is in the log: [Log lines and what to do](log_lines.md) has the lines.
- `cause` is the class of the error; [Refusals](refusals.md) has the sentences. A request counts once, of
  each worker. A handshake that is tried again is refused again.
- `rank` is the worker's in its engine.

## Questions

[A dashboard for Grafana](dashboard.json) asks them (Dashboards, New, Import). Its queries are run against
metrics that a real Prometheus has scraped, by a test that needs `prometheus` on the path
(`experiments/env_prometheus.sh` unpacks Debian's, and so does the gate); Grafana itself has not been tried.

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
        f"\n## Old releases\n\n`<= {without[-1]}` have no metrics of the connector's: nothing is "
        "wrapped there, and the [log](log_lines.md) is what there is. What schedulers know (P's "
        "host buffer, and refusals of a request's parameters and of what never fits the host "
        f"buffer) is shown from {_first(HOST_BLOCKS)} on, where the release asks schedulers by "
        "themselves.\n"
    )
