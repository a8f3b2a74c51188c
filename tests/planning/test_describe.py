"""``kvpatch describe`` against the caches that vLLM makes, and pairs of descriptions in a plan."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpatch.peer.engine_description import packed, unpacked
from kvpatch.peer.peer_hash import digest_of
from kvpatch.tools.cli import app
from kvpatch.tools.engine_report import report, values_of
from kvpatch.tools.planning import arguments
from kvpatch.tools.planning.arguments import DESCRIPTION, read_arguments
from kvpatch.tools.planning.engine import engine_of

from .described import described
from .walk import plan

pytestmark = pytest.mark.patching

_CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("models.json").read_text(encoding="utf-8")
)
_GEMMA, _GRANITE = "Gemma3ForCausalLM", "GraniteMoeHybridForCausalLM"
_MLA, _QWEN = "DeepseekV3ForCausalLM", "Qwen3ForCausalLM"
_MODELS = (_QWEN, _GEMMA, _GRANITE, _MLA)
_TRANSFER = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
_NGRAM = '{"method":"ngram","num_speculative_tokens":2}'
_STATES = ("VLLM_SSM_CONV_STATE_LAYOUT=DS",)
#: By name: model, further arguments, and variables.
_ENGINES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    **{name: (name, (), _STATES) for name in _MODELS},
    "ranks": (_GRANITE, ("--tensor-parallel-size", "2"), _STATES),
    "heads": (_QWEN, ("--tensor-parallel-size", "2"), ()),
    "larger": (_QWEN, ("--block-size", "256", "--port", "8001"), ("ENABLE_KVPATCH=true",)),
    "float16": (_QWEN, ("--dtype", "float16", "--port", "8001"), ("ENABLE_KVPATCH=false",)),
    "drafts": (_QWEN, ("--speculative-config", _NGRAM), ()),
    "odd": (_QWEN, ("--tensor-parallel-size", "3"), ()),
    "typo": (_QWEN, ("--block-size", "17"), ()),
}  # fmt: skip


@pytest.fixture(scope="module", name="described")
def _described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Descriptions by the names of :data:`_ENGINES`, and one for another platform."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("described")
    for model in _MODELS:
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(_CONFIGS[model]))
    commands: list[dict[str, Any]] = []
    for model, more, variables in _ENGINES.values():
        served = ["vllm", "serve", str(folder / model), "--kv-transfer-config", _TRANSFER, *more]
        commands.append({"command": [*variables, *served]})
    on_cuda = {"platform": "cuda", "attention_backend": "FLASH_ATTN"}
    of_cuda = [one.replace('"cpu"', '"cuda"') for one in commands[0]["command"]]
    commands.append({**on_cuda, "command": [*of_cuda, "--block-size", "64"]})
    return dict(zip([*_ENGINES, "cuda"], described(commands), strict=True))


def test_states_are_those_of_the_model(described: dict[str, Any]) -> None:
    """Of layers with keys and values test_models.py has the caches."""
    config = _CONFIGS[_GRANITE]
    layers = described[_GRANITE]["caches"]["layers"]
    heads, inner = config["mamba_n_heads"], [config["mamba_d_head"], config["mamba_d_state"]]

    kinds = ["MambaSpec" if one["kind"] == "MambaSpec" else "attention" for one in layers]
    assert len(set(kinds)) == 2 and len(kinds) == config["num_hidden_layers"]
    for one in layers:
        if one["kind"] == "MambaSpec":
            assert one["shapes"][1] == [heads, *inner]


def test_two_ranks_have_halves(described: dict[str, Any]) -> None:
    whole, half = (described[name]["caches"]["layers"] for name in (_GRANITE, "ranks"))
    states = [(one["shapes"], two["shapes"]) for one, two in zip(whole, half, strict=True)]
    config = _CONFIGS[_GRANITE]

    assert whole[0]["parts"] == half[0]["parts"]
    for (_, (units, *_)), (_, (share, *_)) in filter(all, states):
        assert (units, share) == (config["mamba_n_heads"], config["mamba_n_heads"] // 2)
    assert described["heads"]["caches"]["layers"][0]["kv_heads"] == (
        _CONFIGS[_QWEN]["num_key_value_heads"] // 2
    )


@pytest.mark.parametrize("name", [name for name in _ENGINES if name not in ("odd", "typo")])
def test_the_factors_come_to_the_digest(name: str, described: dict[str, Any]) -> None:
    hashed = described[name]["hash"]

    assert digest_of(hashed["factors"]) == hashed["digest"]
    assert digest_of({**hashed["factors"], "head_size": 1}) != hashed["digest"]


def test_what_vllm_refuses_is_a_sentence(described: dict[str, Any]) -> None:
    for name in ("odd", "typo"):
        assert "does not make an engine of this here" in described[name]["refused"]


# --- plans of them ------------------------------------------------------------------


@pytest.fixture(name="plan")
def _plan(tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Plans a pair of descriptions."""

    def planned(*sides: dict[str, Any]) -> tuple[int, Any]:
        files = [tmp_path / "p.json", tmp_path / "d.json"]
        for path, content in zip(files, sides, strict=True):
            path.write_text(json.dumps(content))
        status, output = plan(*files, "--json")
        return status, output if status == 2 else json.loads(output)

    return planned


def _elsewhere(described: dict[str, Any]) -> dict[str, Any]:
    """On another machine and at another port, as D of a pair must be."""
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2", "VLLM_NIXL_SIDE_CHANNEL_PORT": "6000"}
    options = {**described["options"], "port": 9000}
    return {**described, "env": {**described["env"], **env}, "options": options}


@pytest.mark.parametrize("model", [_QWEN, _GEMMA])
def test_a_like_pair_serves(model: str, described: dict[str, Any], plan: Any) -> None:
    status, found = plan(described[model], _elsewhere(described[model]))

    assert (status, found["configured"]["outcome"]) == (0, "identical")
    assert found["assumed"] == []


def test_other_blocks_are_read_by_kvpatch_alone(described: dict[str, Any], plan: Any) -> None:
    larger = _elsewhere(described["larger"])

    status, found = plan(larger, _elsewhere({**described[_QWEN], "env": {}}))
    assert (status, found["stock"]["outcome"]) == (1, "refused at the first request")

    # Without kvpatch on P nothing says in which order a CPU has P's keys.
    status, found = plan({**described[_QWEN], "env": {"ENABLE_KVPATCH": "true"}}, larger)
    assert (status, found["kvpatch"]["outcome"]) == (0, "identical"), found["kvpatch"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_size": 7}, "the heads' width"),
        ({"num_hidden_layers": 7}, "the layers"),
        ({"is_hma_enabled": False}, "--disable-hybrid-kv-cache-manager"),
        ({"model": "m"}, "--model"),
        ({"attn_backend_name": "OTHER"}, "the attention backend"),
    ],
)
def test_what_the_hash_tells_apart_is_refused(
    change: dict[str, Any], says: str, described: dict[str, Any], plan: Any
) -> None:
    d = _elsewhere(described[_QWEN])
    d["hash"] = {"digest": "", "factors": {**d["hash"]["factors"], **change}}

    status, found = plan(described[_QWEN], d)

    assert (status, found["stock"]["outcome"]) == (1, "refused at the first request")
    assert says in found["stock"]["reason"]


def test_another_platform_takes_its_backend_from_the_command_line(
    described: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps(described["cuda"]))

    engine = engine_of("D", read_arguments(str(path)))

    assert (engine.device, engine.backend.name) == ("cuda", "FLASH_ATTN")
    assert (engine.caches.block_tokens, engine.kernel_tokens) == (64, 64)
    assert described["cuda"]["hash"]["factors"]["attn_backend_name"] == "FLASH_ATTN"


def _spoilt(content: dict[str, Any], place: tuple[Any, ...], value: object) -> dict[str, Any]:
    """A copy with another value in one place."""
    copy = json.loads(json.dumps(content))
    found = copy
    for name in place[:-1]:
        found = found[name]
    found[place[-1]] = value
    return dict(copy)


@pytest.mark.parametrize(
    ("model", "place", "value", "says"),
    [
        (_QWEN, ("kvpatch_description",), 2, "is a description of schema 2"),
        (_QWEN, ("caches",), {}, "is no whole description"),
        (_QWEN, ("hash",), {}, "is no whole description"),
        (_QWEN, ("caches", "layers", 1, "head_dim"), 8, "several shapes"),
        # A backend that is not known.
        (_MLA, ("port",), 1, "not planned for: latents (MLA) of the attention backend CPU_MLA"),
    ],
)
def test_what_is_not_planned_for_is_status_2(
    model: str,
    place: tuple[Any, ...],
    value: object,
    says: str,
    described: dict[str, Any],
    plan: Any,
) -> None:
    status, output = plan(_spoilt(described[model], place, value), described[model])

    assert status == 2 and says in output


@pytest.mark.parametrize("command", [["python", "app.py"], ["A=b"]])
def test_what_is_no_command_is_status_2(command: list[str]) -> None:
    found = CliRunner().invoke(app, ["describe", "--", *command])

    assert found.exit_code == 2 and "starts no API server of vLLM's" in found.output


def _published(content: dict[str, Any]) -> str:
    text = packed({**content, "about": {**content["about"], "running": True}})
    return f'{DESCRIPTION}{{engine="0",packed="{text}"}} 1.0\n'


def test_a_running_engine_is_planned_by_its_url(
    described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its metrics; tests/serving compares those of engines with what describe says."""
    shown = {
        "http://like:1": _published(described[_QWEN]),
        "http://unlike:1": _published(described["heads"]) + _published(described[_QWEN]),
        "http://odd:1": _published(described["float16"]),
        "http://none:1": "",
    }
    monkeypatch.setattr(arguments, "text_of", lambda url, _: shown[url])
    d = tmp_path / "d.json"
    asked = CliRunner().invoke(app, ["describe", "--url", "http://like:1", "--output", str(d)])
    assert asked.exit_code == 0, asked.output

    found = {url: CliRunner().invoke(app, ["plan", url, str(d)]) for url in shown}

    assert [one.exit_code for one in found.values()] == [0, 2, 1, 2]
    assert "several descriptions" in found["http://unlike:1"].output
    assert "use one --dtype" in found["http://odd:1"].output
    assert "has no description" in found["http://none:1"].output
    sentence = report(values_of(shown["http://like:1"])).sentences[0]
    assert described[_QWEN]["hash"]["digest"] in sentence


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("caches", "heads"), None),
        (("caches", "block_tokens"), True),
        (("caches", "kv_heads"), -1),
        (("caches", "cache_dtype"), {}),
        (("caches", "groups"), []),
        (("caches", "groups"), ""),
        (("caches", "layers", 0, "dtypes"), None),
        (("caches", "layers", 0, "dtypes"), []),
        (("caches", "layers", 0, "window"), [[1]]),
        (("vllm",), "\x1b[31m\n0.33.0"),
        (("about", "platform"), "A" * 10**5),
    ],
)
def test_what_another_service_describes_is_a_short_sentence(
    place: tuple[Any, ...],
    value: object,
    described: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever answers at the URL may have written it: values of other types, and texts."""
    shown = _published(_spoilt(described[_QWEN], place, value))
    monkeypatch.setattr(arguments, "text_of", lambda url, _: shown)
    d = tmp_path / "d.json"
    d.write_text(json.dumps(described[_QWEN]))

    asked = CliRunner().invoke(app, ["plan", "http://p:1", str(d)])

    assert type(asked.exception) is SystemExit and asked.exit_code in (1, 2), asked.exception
    for text in (asked.output, *report(values_of(shown)).sentences):
        assert "\x1b" not in text and len(text) < 10**4


def test_what_is_no_sample_is_skipped() -> None:
    """A service that is no engine, or one that does not end a label."""
    text = "kvpatch_loads_total nothing\nkvpatch_loads_total{" + "a" * 10**6 + "} 1.0\n"

    assert values_of(text) == {"kvpatch_loads_total": {"": 1.0}}


_DEEP = base64.b64encode(zlib.compress(b"[" * 10**6)).decode()


@pytest.mark.parametrize("text", ["eJw=", "", "x", packed({})[:-8], "bnVsbA==", _DEEP])
def test_what_is_no_description_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpacked(text)
