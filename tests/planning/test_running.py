"""``kvpatch plan`` of engines that run, by what real ones answered (record_answers.py)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvpatch.core.errors import BadOptions, ReleaseNotKnown, RequestFailed
from kvpatch.tools import api_server
from kvpatch.tools.cli import app
from kvpatch.tools.planning.answers import CACHE_INFO, MODELS, SERVER_INFO, VERSION, ask

from .record_answers import FILE, METRICS, MODEL
from .walk import CONFIG

pytestmark = pytest.mark.patching

RECORDED = json.loads(FILE.read_text())
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

#: By path, status and text.
Answers = dict[str, Any]
Serve = Callable[[Mapping[str, Any]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves answers on a port of this machine, each call others; returns the URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Mapping[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = answers.get(self.path, (404, '{"detail":"Not Found"}'))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _answers(side: str, **changes: tuple[int, str]) -> Answers:
    """A real engine's; changes by the last word of a path."""
    names = {"version": VERSION, "models": MODELS, "metrics": METRICS, "server_info": SERVER_INFO}
    return {**RECORDED[side], **{names[name]: answer for name, answer in changes.items()}}


def _edited(side: str, path: str, *edits: tuple[str, str]) -> tuple[int, str]:
    status, text = RECORDED[side][path]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return status, text


def _configured(change: Callable[[Any], None]) -> tuple[int, str]:
    status, text = RECORDED["D"][SERVER_INFO]
    content = json.loads(text)
    change(content)
    return status, json.dumps(content)


def _plan(folder: Path, *arguments: object) -> tuple[int, str]:
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    given = ["plan", *map(str, arguments), "--model-config", str(config)]
    found = CliRunner().invoke(app, given)
    return found.exit_code, found.output


def _json(folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    status, output = _plan(folder, *arguments, "--json")
    return status, json.loads(output)


def _file(folder: Path, url: str, **changes: Any) -> Path:
    """P's file beside its URL; None leaves an option out, and `about` is of the section."""
    about = {"url": url, "platform": "cpu", **changes.pop("about", {})}
    options = {
        "model": MODEL,
        "dtype": "float32",
        "tensor-parallel-size": 1,
        "kv-transfer-config": json.dumps(TRANSFER),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    content = {name: value for name, value in options.items() if value is not None}
    path = folder / "p.yaml"
    path.write_text(yaml.safe_dump({**content, "kvpatch": about}))
    return path


def _warnings(found: Mapping[str, Any], side: str) -> list[str]:
    return [
        one["what"]
        for one in found["preflight"]
        if one["side"] == side and "running engine" in one["what"]
    ]


def test_what_a_real_engine_tells(serve):
    production, developing = (ask(serve(_answers(side))) for side in "PD")

    told = {name: one.value for name, one in production.options.items()}
    assert told == {
        "model": MODEL,
        "block_size": 128,
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": True,
    }
    assert production.about["release"].value == RECORDED["release"]
    assert (production.shows_connector, production.shows_kvpatch) == (True, False)
    assert production.environment is None
    assert "VLLM_SERVER_DEV_MODE=1" in production.silences[0]

    told = {name: one.value for name, one in developing.options.items()}
    assert (told["block_size"], told["dtype"], told["tensor_parallel_size"]) == (32, "float32", 1)
    assert told["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    assert developing.about["platform"].value == "cpu"  # VLLM_TARGET_DEVICE says cuda
    assert set(developing.environment) == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
    assert (developing.shows_connector, developing.shows_kvpatch) == (True, True)
    assert developing.silences == []


def test_two_urls_are_a_pair(serve, tmp_path):
    """Both as D was recorded, in dev mode: P with larger blocks."""
    larger = _edited("D", METRICS, ('block_size="32"', 'block_size="128"'))
    p, d = serve(_answers("D", metrics=larger)), serve(_answers("D"))

    status, found = _json(tmp_path, "--from-url", p, d)

    assert (status, found["kvpatch"]["way"]) == (0, "read by kvpatch")
    assert "blocks of 128 tokens" in found["prefill"] and "CPU_ATTN" in found["decode"]
    facts = found["facts"]["P"]
    assert facts["block-size"] == {"value": 128, "from": f"{p}{METRICS} {CACHE_INFO}"}
    assert facts["release"] == {"value": "0.32.0", "from": f"{p}{VERSION}"}
    assert facts["tensor-parallel-size"] == {"value": 1, "from": f"{p}{SERVER_INFO}"}
    assert facts["env ENABLE_KVPATCH"]["from"] == f"{p}{METRICS}"
    assert any("KVPATCH_*" in line for line in found["assumed"])


def test_a_url_beside_a_file_of_an_engine_that_is_not_started(serve, tmp_path):
    """The file's side is as it is without a URL, and says so."""
    d = serve(_answers("D"))
    p = _file(tmp_path, "http://127.0.0.1:9", about={"release": "0.32.0"}, block_size=128)

    status, found = _json(tmp_path, p, d)

    assert status == 0
    assert found["facts"]["P"]["block-size"] == {"value": 128, "from": str(p)}
    assert found["facts"]["D"]["block-size"]["value"] == 32


def test_what_production_does_not_tell_is_asked_for(serve, tmp_path):
    p, d = serve(_answers("P")), serve(_answers("D"))

    status, output = _plan(tmp_path, "--from-url", p, d)

    assert status == 2
    expected = "dtype, tensor-parallel-size, kv-transfer-config, platform, attention-backend"
    assert f"{p} does not tell {expected} (" in output
    assert "VLLM_SERVER_DEV_MODE=1" in output and f"url: {p}" in output
    assert "--from-url" in output


def test_a_file_supplies_what_production_does_not_tell(serve, tmp_path):
    p, d = serve(_answers("P")), serve(_answers("D"))
    file = _file(tmp_path, p)

    status, found = _json(tmp_path, "--from-url", file, d)

    assert (status, found["kvpatch"]["way"]) == (0, "read by kvpatch")
    assert found["facts"]["P"]["block-size"]["value"] == 128
    assert found["facts"]["P"]["dtype"] == {"value": "float32", "from": str(file)}
    assert _warnings(found, "P") == []


def test_a_file_is_not_asked_about_without_the_option(serve, tmp_path):
    p, d = serve(_answers("P")), serve(_answers("D"))

    status, output = _plan(tmp_path, _file(tmp_path, p), d)

    assert status == 2 and "which release of vLLM is it?" in output


def test_what_a_file_leaves_out_is_vllms_own_and_said(serve, tmp_path):
    p, d = serve(_answers("P")), serve(_answers("D"))

    _, found = _json(tmp_path, "--from-url", _file(tmp_path, p, tensor_parallel_size=None), d)

    assert any("says tensor-parallel-size: vLLM's own is taken (1)" in s for s in found["assumed"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 64}, "block-size: 64, and the running engine answers 128"),
        ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype: fp8, and the running engine answers auto"),
        ({"model": "another"}, f"model: another, and the running engine answers {MODEL}"),
        (
            {"no_enable_prefix_caching": True},
            "enable-prefix-caching: False, and the running engine answers True",
        ),
        ({"about": {"release": "0.31.0"}}, "release: 0.31.0, and the running engine answers"),
    ],
)
def test_a_file_that_the_engine_denies_is_told_and_gives_way(serve, tmp_path, changes, says):
    p, d = serve(_answers("P")), serve(_answers("D"))
    file = _file(tmp_path, p, **changes)

    status, found = _json(tmp_path, "--from-url", file, d)

    (said,) = _warnings(found, "P")
    assert said.startswith(f"{file} says {says}")
    assert status == 0 and "vLLM 0.32.0" in found["prefill"] and "128 tokens" in found["prefill"]
    assert any(change.startswith("P: write ") for change in found["changes"])


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "auto"},
        {"block_size": "32"},
        {"kv_transfer_config": TRANSFER},
        {"attention_backend": "cpu_attn"},
        {"about": {"release": "0.32.0+cpu"}},
        {"about": {"env": {"ENABLE_KVPATCH": 1}}},
    ],
)
def test_what_means_the_same_is_no_contradiction(serve, tmp_path, changes):
    def ask_for_a_backend(content: Any) -> None:
        backend = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
        content["vllm_config"]["attention_config"]["backend"] = backend

    about = {"env": {"ENABLE_KVPATCH": "true"}, **changes.get("about", {})}
    d = serve(_answers("D", server_info=_configured(ask_for_a_backend)))

    _, found = _json(tmp_path, "--from-url", d, _file(tmp_path, d, **{**changes, "about": about}))

    assert _warnings(found, "D") == []
    assert found["facts"]["D"]["attention-backend"]["value"] == "CPU_ATTN"


def test_variables_that_the_engine_has_not_are_told(serve, tmp_path):
    variables = {"VLLM_PLUGINS": "kvpatch", "VLLM_NIXL_SIDE_CHANNEL_PORT": 5600}
    d = serve(_answers("D"))

    _, found = _json(tmp_path, "--from-url", d, _file(tmp_path, d, about={"env": variables}))

    said = _warnings(found, "D")
    assert any("env VLLM_PLUGINS: kvpatch, and the running engine answers unset" in s for s in said)
    assert any("SIDE_CHANNEL_PORT: 5600, and the running engine answers 19843" in s for s in said)
    assert any("env ENABLE_KVPATCH: unset, and the running engine answers true" in s for s in said)
    assert "env VLLM_PLUGINS" not in found["facts"]["D"]


def test_an_engine_that_should_have_kvpatch_and_has_not(serve, tmp_path):
    """A plan is then of what it does without."""
    p, d = serve(_answers("D")), serve(_answers("P"))
    asked = {"env": {"ENABLE_KVPATCH": "true"}}
    file = _file(tmp_path, d, about=asked)

    status, found = _json(tmp_path, "--from-url", p, file)

    assert status == 1 and found["kvpatch_on_decode"] is False
    (error,) = [one for one in found["preflight"] if one["level"] == "error"]
    assert error["side"] == "D" and "shows no metrics of kvpatch's" in error["what"]

    hidden = {"env": {**asked["env"], "KVPATCH_DISABLE": "metrics"}}
    _, found = _json(tmp_path, "--from-url", p, _file(tmp_path, d, about=hidden))
    assert found["kvpatch_on_decode"] is True


def test_an_engine_without_the_connector(serve, tmp_path):
    bare = "".join(
        line for line in RECORDED["P"][METRICS][1].splitlines(True) if "nixl" not in line
    )
    p, d = serve(_answers("P", metrics=(200, bare))), serve(_answers("D"))

    status, found = _json(tmp_path, "--from-url", _file(tmp_path, p), d)

    assert status == 1
    assert any("no metrics of NixlConnector's" in one["what"] for one in found["preflight"])

    def without(content: Any) -> None:
        content["vllm_config"]["kv_transfer_config"] = None

    none = serve(_answers("D", server_info=_configured(without)))
    status, found = _json(tmp_path, none, d)
    assert status == 1
    assert any("no --kv-transfer-config" in one["what"] for one in found["preflight"])


def test_builds_of_one_release_have_unlike_hashes(serve, tmp_path):
    """What stock refuses, though both are 0.32.0; a file's release says nothing of a build."""
    build = (200, '{"version":"0.32.0+cpu"}')
    p, d = serve(_answers("D", version=build)), serve(_answers("D"))

    status, found = _json(tmp_path, p, d)
    assert status == 1
    assert "0.32.0+cpu" in found["stock"]["reason"] and "0.32.0+cpu" in found["kvpatch"]["reason"]
    assert "KVPATCH_ACCEPT=vllm_version" in found["kvpatch"]["cure"]

    file = _file(tmp_path, "", about={"release": "0.32.0"}, block_size=32)
    assert _json(tmp_path, file, p)[0] == 0


@pytest.mark.parametrize(
    ("release", "asked", "told"),
    [
        ("0.17.1", None, 16),
        ("0.18.0", "False", None),
        ("0.18.0", "True", 16),
        ("0.23.0", "False", 16),
    ],
)
def test_a_block_size_that_the_api_server_does_not_know_is_not_told(serve, release, asked, told):
    labels = f'block_size="16",cache_dtype="auto",user_specified_block_size="{asked}"'
    if asked is None:
        labels = 'block_size="16",cache_dtype="auto"'
    url = serve(
        {
            VERSION: (200, json.dumps({"version": release})),
            METRICS: (200, f"{CACHE_INFO}{{{labels}}} 1.0\n"),
        }
    )

    found = ask(url)

    assert getattr(found.options.get("block_size"), "value", None) == told
    assert any("workers have chosen" in line for line in found.silences) == (told is None)


def test_rocm_is_told_from_cuda_by_its_torch(serve):
    def told(hip: Any, **machine: Any) -> Any:
        def change(content: Any) -> None:
            content["vllm_config"]["device_config"] = {"device": "cuda", "device_type": "cuda"}
            content["system_env"] = {**machine, "hip_compiled_version": hip} if hip else None

        return ask(serve(_answers("D", server_info=_configured(change)))).about.get("platform")

    assert told("N/A").value == "cuda"
    assert told("6.3.42134").value == "rocm"
    assert told(None) is None  # <= 0.13 nobody says


def test_a_build_that_is_not_listed_is_what_the_operator_says(serve, monkeypatch):
    url = serve({VERSION: (200, '{"version":"0.33.1"}')})
    with pytest.raises(ReleaseNotKnown, match="set KVPATCH_GENERATION to the release whose code"):
        ask(url)

    monkeypatch.setenv("KVPATCH_GENERATION", "0.33.0")

    found = ask(url)
    assert (found.version, found.facts.release) == ("0.33.1", "0.33.0")


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "this is no API server of vLLM's"),
        ({VERSION: (200, "<html>")}, "this is no API server of vLLM's"),
        ({VERSION: (200, '{"version":1}')}, "this is no API server of vLLM's"),
        ({VERSION: (502, "Bad Gateway")}, "answers HTTP 502"),
        ({VERSION: (200, '{"version":"0.9.2"}')}, "is not a release that kvpatch knows"),
        ({VERSION: (200, '{"version":"0.1.dev7+g1"}')}, "is not a release that kvpatch knows"),
        ({VERSION: (200, '{"version":"0.32.0"}')}, "does not tell model, block-size, dtype"),
        (
            _answers("D", models=(401, "Unauthorized"), server_info=(401, "")),
            "/v1/models asks for an API key",
        ),
        (
            _answers("D", server_info=(200, '{"vllm_config": "model=..."}')),
            "vLLM <= 0.10 has it as text alone",
        ),
        (
            _answers(
                "D",
                metrics=(
                    200,
                    f'{CACHE_INFO}{{block_size="16",engine="0"}} 1.0\n'
                    f'{CACHE_INFO}{{block_size="32",engine="1"}} 1.0\n',
                ),
            ),
            "the engines behind it differ",
        ),
    ],
)
def test_what_cannot_be_asked_is_status_2_with_a_sentence(serve, tmp_path, answers, says):
    p, d = serve(answers), serve(_answers("D"))

    status, output = _plan(tmp_path, p, d)

    assert status == 2
    assert says in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9/version does not answer: "),
        ("http://no such host", "does not answer"),
        ("ftp://127.0.0.1", "is neither a file nor a URL like http://127.0.0.1:8000"),
        ("p:8000", "p:8000 cannot be read"),
    ],
)
def test_what_is_not_there_is_status_2_with_a_sentence(tmp_path, source, says):
    status, output = _plan(tmp_path, source, source)

    assert (status, says in output) == (2, True), output
    assert "Traceback" not in output


def test_running_engines_are_asked_for_and_none_is_named(tmp_path):
    file = _file(tmp_path, "", about={"release": "0.32.0"})
    file.write_text(file.read_text().replace("url: ''", "machine: here"))

    status, output = _plan(tmp_path, "--from-url", file, file)

    assert status == 2 and "found neither" in output


def test_whoever_answers_slowly_or_without_an_end_is_given_up(monkeypatch):
    """A byte at a time keeps any socket's own timeout from ending it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * (1 if self.path == "/slow" else 1 << 16))
                    self.wfile.flush()
                    time.sleep(0.01 if self.path == "/slow" else 0)
            except OSError:
                return

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setattr(api_server, "_MOST_BYTES", 1 << 20)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(RequestFailed, match="timed out"):
            api_server.answer_of(url, "/slow", timeout_seconds=0.3)
        with pytest.raises(RequestFailed, match="more than 1048576 bytes"):
            api_server.answer_of(url, "/endless")
        with pytest.raises(BadOptions):
            api_server.answer_of("file:///etc", "/hosts")
    finally:
        server.shutdown()
        server.server_close()


def test_an_answer_that_breaks_off_is_none(serve):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(RequestFailed, match="does not answer"):
            api_server.answer_of(f"http://127.0.0.1:{server.server_port}", "/")
    finally:
        server.shutdown()
        server.server_close()


def test_a_running_engine_is_described_as_far_as_it_tells(serve, tmp_path):
    """P tells nothing of its configuration in production; D is in development mode."""
    files = []
    for side in "PD":
        found = CliRunner().invoke(app, ["doctor", "--url", serve(_answers(side)), "--describe"])
        assert found.exit_code == 0, found.output
        files.append(tmp_path / f"{side}.json")
        files[-1].write_text(found.output)
    p, d = files
    content = json.loads(d.read_text())

    assert (content["caches"], content["hash"]) == (None, None)
    assert content["options"]["block_size"] == 32 and content["about"]["platform"] == "cpu"
    _, planned = _json(tmp_path, d, d)
    assert planned["stock"]["outcome"] == "identical"
    status, output = _plan(tmp_path, p, d)
    assert status == 2 and "does not tell" in output

    status, output = _plan(tmp_path, d, d, "--platform", "cuda")
    assert status == 2 and "describes an engine with platform cpu" in output
    assert CliRunner().invoke(app, ["doctor", "--describe"]).exit_code == 2
