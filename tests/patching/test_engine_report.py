"""What ``kvpatch doctor --url`` makes of metrics; a real engine's are read in tests/serving."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from kvpatch.observe.catalogue import METRICS
from kvpatch.tools import cli
from kvpatch.tools.engine_report import report, values_of

_D = """\
# HELP kvpatch_loads_total Requests that a worker was to load, by outcome.
# TYPE kvpatch_loads_total counter
kvpatch_loads_total{engine="0",model_name="a \\"model\\"",outcome="received"} 90.0
kvpatch_loads_total{engine="1",model_name="a \\"model\\"",outcome="received"} 10.0
kvpatch_loads_total{engine="0",model_name="a \\"model\\"",outcome="failed"} 0.0
kvpatch_loads_total{engine="0",model_name="a \\"model\\"",outcome="stale"} 0.0
kvpatch_load_holds_total{engine="0",hold="held",model_name="m"} 60.0
kvpatch_load_holds_total{engine="0",hold="unproven",model_name="m"} 40.0
kvpatch_load_holds_total{engine="0",hold="gone",model_name="m"} 0.0
kvpatch_reads_total{engine="0",model_name="m",way="stock"} 0.0
kvpatch_reads_total{engine="0",model_name="m",way="staged"} 4.0
kvpatch_read_bytes_total{engine="0",model_name="m",way="staged"} 8.388608e+06
kvpatch_read_seconds_total{engine="0",model_name="m",way="staged"} 0.1
kvpatch_refusals_total{cause="PeerRefused",engine="0",model_name="m"} 0.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 4.0
kvpatch_staging_pool_waits_total{engine="0",model_name="m"} 1.0
kvpatch_staging_pool_bytes{engine="0",model_name="m",rank="0"} 2.097152e+06
kvpatch_staging_pool_bytes{engine="0",model_name="m",rank="1"} 2.097152e+06
"""


def test_a_decode_engine_that_healthy() -> None:
    found = report(values_of(_D))

    assert found.healthy
    assert found.sentences == (
        "Its workers were to load 100 requests, and 0 loads failed.",
        "Of 60 loads P has said that it held the blocks to the last byte.",
        "Of 40 loads it is not proven that P held the blocks: it has no kvpatch, or its answer "
        "came without kvpatch_hold.",
        "4 reads came through the staging pool, of 2.00 MiB in 25.0 ms each.",
        "1 of 4 reads through staging pools of 4 MiB in all had to wait for room: more "
        "KVPATCH_STAGING_BYTES keep them from that.",
    )


def test_loads_that_failed_and_refusals() -> None:
    text = _D.replace('outcome="failed"} 0.0', 'outcome="failed"} 25.0').replace(
        'model_name="m"} 0.0', 'model_name="m"} 3.0'
    )

    found = report(values_of(text))

    assert not found.healthy
    assert "20.0 % of loads failed" in found.sentences[1]
    assert any(s.startswith("PeerRefused was raised 3 times") for s in found.sentences)


def test_loads_of_blocks_that_p_has_given_away() -> None:
    text = _D.replace('outcome="stale"} 0.0', 'outcome="stale"} 25.0').replace(
        'hold="gone",model_name="m"} 0.0', 'hold="gone",model_name="m"} 25.0'
    )

    found = report(values_of(text))

    assert not found.healthy
    loads, failed, why, *_ = found.sentences
    assert loads == "Its workers were to load 125 requests, and 25 loads failed."
    assert "20.0 % of loads failed" in failed
    assert why.startswith("25 of them failed since P let go of their blocks")


@pytest.mark.parametrize("wrong", [0, 2])
def test_loads_that_were_compared_with_digests(wrong: int) -> None:
    counts = {"checked": 4, "partly": 1, "alarm": wrong, "unchecked": 1}
    found = report(values_of(_D + _of("load_digests", "digest", counts))).sentences

    compared = f"Of {5 + wrong} loads that were compared with P's digests {wrong} were not what P"
    assert any(sentence.startswith(compared) for sentence in found)
    assert any(sentence.startswith("Each of these has failed") for sentence in found) is bool(wrong)
    assert "1 loads were not compared with digests, or not wholly." in found
    assert any(sentence.startswith("Of 1 of the compared loads some tokens") for sentence in found)


def _of(name: str, label: str, counts: dict[str, int]) -> str:
    return "".join(
        f'kvpatch_{name}_total{{engine="0",model_name="m",{label}="{value}"}} {count}.0\n'
        for value, count in counts.items()
    )


def test_a_prefill_engine_with_a_host_buffer() -> None:
    found = report(
        values_of(
            'kvpatch_loads_total{engine="0",model_name="m",outcome="received"} 0.0\n'
            'kvpatch_host_buffer_blocks{engine="0",model_name="m",state="all"} 10\n'
            'kvpatch_host_buffer_blocks{engine="0",model_name="m",state="reserved"} 8\n'
            'kvpatch_host_buffer_waiting_requests{engine="0",model_name="m"} 2\n'
        )
    )

    assert found.healthy
    assert found.sentences[1:] == (
        "8 of 10 host blocks are reserved, and 2 requests wait for some.",
        "More KVPATCH_HOST_BUFFER_BYTES let them begin.",
    )


def test_an_engine_without_kvpatch() -> None:
    found = report(values_of('vllm:nixl_xfer_time_seconds_count{engine="0"} 4.0\n'))

    assert not found.healthy
    assert "ENABLE_KVPATCH is not set" in found.sentences[0]


def test_what_it_reads_is_what_the_engine_shows() -> None:
    """Names that the report asks for are metrics; a typing error would read as 0."""
    asked: set[str] = set()

    class Asked(dict[str, dict[str, float]]):
        def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
            asked.add(name)
            return super().get(name, default)  # type: ignore[arg-type]

    report(Asked(values_of(_D)))

    assert asked <= {metric.shown_name for metric in METRICS}
    assert len(asked) > 5


@pytest.fixture
def served() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_there = self.path == "/metrics"
            self.send_response(200 if is_there else 404)
            self.end_headers()
            self.wfile.write(_D.encode() if is_there else b"")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_command(served: str) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--url", f"{served}/"])

    assert done.exit_code == 0, done.output
    assert "100 requests" in done.output
    assert (
        '"well": true' in CliRunner().invoke(cli.app, ["doctor", "--url", served, "--json"]).output
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "file:///etc/hostname", "d:8000"])
def test_an_engine_that_does_not_answer(url: str) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--url", url])

    assert done.exit_code == 2
    assert "error: " in done.output
