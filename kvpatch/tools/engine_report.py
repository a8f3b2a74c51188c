"""How an engine is doing, in sentences, from the metrics that its API server shows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvpatch.core.errors import LOOK_INTO_LOG, BadOptions, RequestFailed
from kvpatch.core.text import one_line
from kvpatch.peer.engine_description import unpacked

if TYPE_CHECKING:
    from rich.console import Console

SCHEMES = ("http://", "https://")
METRICS = "/metrics"

_TIMEOUT_SECONDS = 10.0
#: More than the metrics of any engine; whoever answers without an end is no engine.
_MOST_BYTES = 64 * 1024**2
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE = re.compile(r"\\.")

_SAMPLE = re.compile(
    r"^(kvpatch_\w+)(?:\{(.*)\})? ([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)$", re.MULTILINE
)
#: vLLM's own labels; what is left is the only one of a metric of ours.
_OF_VLLM = ("model_name", "engine")
_WAYS = {
    "stock": "by vLLM itself",
    "direct": "straight to their places",
    "staged": "through the staging pool",
    "host_buffer": "through the host buffer",
}
#: By a metric and values of its label: what is said of as many loads, and of digests' alarms.
_CHECKS = {
    "load_holds_total": {
        ("gone", "expired"): (
            "{:.0f} of them failed since P let go of their blocks before they had been read, or "
            "may have: a longer lease at P, or more KVPATCH_STAGING_BYTES here, keep them from "
            "that (docs/explanation/stale_blocks.md)."
        ),
        ("held",): "Of {:.0f} loads P has said that it held the blocks to the last byte.",
        ("unproven",): (
            "Of {:.0f} loads it is not proven that P held the blocks: it has no kvpatch, or its "
            "answer came without kvpatch_hold."
        ),
    },
    "load_digests_total": {
        ("checked", "partly", "alarm"): (
            "Of {:.0f} loads that were compared with P's digests {:.0f} were not what P had "
            "computed."
        ),
        ("alarm",): (
            "Each of these has failed: the engine's log says in which layers, heads and tokens "
            "(docs/explanation/digests.md)."
        ),
        ("partly",): (
            "Of {:.0f} of the compared loads some tokens were compared with nothing "
            "(docs/explanation/digests.md)."
        ),
        ("unchecked",): "{:.0f} loads were not compared with digests, or not wholly.",
    },
}
_MIB = 1024**2

#: By metric, by the value of its own label, over all engines behind one API server.
Values = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class EngineReport:
    """The report of ``kvpatch doctor --url``.

    Attributes:
        healthy: True if no load failed and nothing was refused.
    """

    sentences: tuple[str, ...]
    healthy: bool

    def as_dict(self) -> dict[str, Any]:
        return {"sentences": self.sentences, "well": self.healthy}

    def show(self, console: Console) -> None:
        for sentence in self.sentences:
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def report_of(url: str) -> EngineReport:
    """Reads the engine whose API server answers at ``url``.

    Raises:
        BadOptions: there is none there.
        RequestFailed: it does not answer, or shows no metrics.
    """
    return report(values_of(text_of(url, METRICS)))


def values_of(text: str) -> Values:
    """kvpatch's metrics in Prometheus' text; what several engines or ranks show is added up."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, labels, value in samples_of(text):
        own = [v for label, v in labels.items() if label not in _OF_VLLM]
        found[name]["".join(own)] += value
    return found


def report(values: Values) -> EngineReport:
    if not values:
        return EngineReport(
            (
                "It shows no metrics of kvpatch's: ENABLE_KVPATCH is not set in its API server's "
                "process, KVPATCH_DISABLE names metrics, its vLLM is <= 0.11.0, or it has no "
                "NixlConnector.",
            ),
            healthy=False,
        )
    refused = _sum(values, "refusals_total")
    parts = (_engine, _loads, _checks, _reads, _refusals, _pool, _host_buffer)
    sentences = tuple(sentence for part in parts for sentence in part(values))
    return EngineReport(sentences, healthy=not (_not_received(values) or refused))


def _of(values: Values, name: str) -> Mapping[str, float]:
    return values.get(f"kvpatch_{name}", {})


def _sum(values: Values, name: str) -> float:
    return sum(_of(values, name).values())


def _engine(values: Values) -> Iterator[str]:
    for packed in _of(values, "description"):
        try:
            told = unpacked(packed)
            caches, about, hashed = told["caches"], told["about"], told["hash"]
            found = (
                f"It runs vLLM {told['vllm']} on {about['platform']} with "
                f"{about['attention-backend']}: blocks of {caches['block_tokens']} tokens in "
                f"kernel blocks of {caches['kernel_tokens']}, {caches['layout']}, "
                f"{caches['cache_dtype']}, {len(caches['layers'])} layers"
            )
            digest = f"hash {hashed['digest']}" if hashed else "a hash that is not known"
        except (KeyError, TypeError, ValueError):
            yield "It describes itself in words of another kvpatch."
        else:
            yield f"{found}, {digest} (kvpatch describe --url writes the rest)."


def _loads(values: Values) -> Iterator[str]:
    total, failed = _sum(values, "loads_total"), _not_received(values)
    if not total:
        yield "Its workers have loaded nothing yet: it is a P, or nobody has asked."
        return
    yield f"Its workers were to load {total:.0f} requests, and {failed:.0f} loads failed."
    if failed:
        yield (
            f"{100 * failed / total:.1f} % of loads failed: the engine's log names each request "
            "and why (docs/reference/log_lines.md)."
        )


def _not_received(values: Values) -> float:
    loads = _of(values, "loads_total")
    return sum(loads.values()) - loads.get("received", 0)


def _checks(values: Values) -> Iterator[str]:
    for name, sentences in _CHECKS.items():
        counts = _of(values, name)
        for labels, sentence in sentences.items():
            count = sum(counts.get(label, 0) for label in labels)
            if count:
                yield sentence.format(count, counts.get("alarm", 0))


def _reads(values: Values) -> Iterator[str]:
    seconds = _of(values, "read_seconds_total")
    size_bytes = _of(values, "read_bytes_total")
    for way, reads in _of(values, "reads_total").items():
        if reads:
            mean_ms = 1e3 * seconds.get(way, 0) / reads
            mib = size_bytes.get(way, 0) / _MIB / reads
            yield (
                f"{reads:.0f} reads came {_WAYS.get(way, way)}, of {mib:.2f} MiB in "
                f"{mean_ms:.1f} ms each."
            )


def _refusals(values: Values) -> Iterator[str]:
    for cause, count in _of(values, "refusals_total").items():
        if count:
            yield (
                f"{cause} was raised {count:.0f} times: the engine's log has the sentence that "
                "says what to change (docs/reference/refusals.md)."
            )


def _pool(values: Values) -> Iterator[str]:
    waits = _sum(values, "staging_pool_waits_total")
    mib = _sum(values, "staging_pool_bytes") / _MIB
    reads = _of(values, "reads_total")
    pooled = reads.get("staged", 0) + reads.get("host_buffer", 0)
    if waits:
        yield (
            f"{waits:.0f} of {pooled:.0f} reads through staging pools of {mib:.0f} MiB in all had "
            "to wait for room: more KVPATCH_STAGING_BYTES keep them from that."
        )


def _host_buffer(values: Values) -> Iterator[str]:
    blocks = _of(values, "host_buffer_blocks")
    waiting = _sum(values, "host_buffer_waiting_requests")
    if blocks.get("all"):
        yield (
            f"{blocks.get('reserved', 0):.0f} of {blocks['all']:.0f} host blocks are reserved, and "
            f"{waiting:.0f} requests wait for some."
        )
    if waiting:
        yield "More KVPATCH_HOST_BUFFER_BYTES let them begin."


# --- what an API server answers -------------------------------------------------------------


def text_of(url: str, path: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> str:
    """Returns what an API server answers to a GET, if that is no error.

    Raises:
        BadOptions: that is no URL.
        RequestFailed: it does not answer, or with an error.
    """
    if not url.startswith(SCHEMES):
        raise BadOptions(f"{url} is no URL of an API server", "give one like http://127.0.0.1:8000")
    address = f"{url.rstrip('/')}{path}"
    try:
        with urlopen(address, timeout=timeout_seconds) as response:
            body = response.read(_MOST_BYTES + 1)
            if len(body) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes came")
            return str(body.decode(errors="replace"))
    except HTTPError as error:
        error.close()
        raise RequestFailed(
            one_line(f"{address}: HTTP {error.code}: {error.reason}"), LOOK_INTO_LOG
        ) from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise RequestFailed(
            one_line(f"{address} does not answer: {why}"), "start the engine, or give its own URL"
        ) from error


def samples_of(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """kvpatch's samples in Prometheus' text: the metric, its labels, the value."""
    for name, labels, value in _SAMPLE.findall(text):
        named = {
            label: _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), escaped)
            for label, escaped in _LABEL.findall(labels)
        }
        yield name, named, float(value)
