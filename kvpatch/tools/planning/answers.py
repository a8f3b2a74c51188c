"""What a running engine says of itself over HTTP, as far as a plan needs it.

Every release tells its version, its model and the cache's configuration. How many ranks it has,
its connector and its variables are in ``/server_info``, which vLLM has in its development mode
alone. tests/contract/test_answers.py holds all of it against every release's source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RequestFailed
from kvpatch.core.releases import ReleaseFacts, facts_of
from kvpatch.core.text import shown
from kvpatch.tools.api_server import METRICS, Answer, answer_of, samples_of

VERSION = "/version"
MODELS = "/v1/models"
CACHE_INFO = "vllm:cache_config_info"
SERVER_INFO = "/server_info?config_format=json"

#: The first time it asks the machine for all that it has.
_SERVER_INFO_SECONDS = 60.0
_NONE = "None"
_NOT_ALLOWED = (401, 403)

#: What a plan reads of vLLM's variables.
VARIABLES = (
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_PLUGINS",
)
#: Read on releases without leases, and by later ones for nothing.
PATIENCE = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"

#: By the label of the cache's configuration, the option that it is.
CACHE_LABELS = {
    "block_size": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "kv_cache_layout": "kv_cache_layout",
}
IS_ASKED_FOR = "user_specified_block_size"

#: By option, where the whole configuration has it.
CONFIGURED = {
    "model": ("model_config", "model"),
    "dtype": ("model_config", "dtype"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
    "decode_context_parallel_size": ("parallel_config", "decode_context_parallel_size"),
    "prefill_context_parallel_size": ("parallel_config", "prefill_context_parallel_size"),
    "data_parallel_size": ("parallel_config", "data_parallel_size"),
    "nnodes": ("parallel_config", "nnodes"),
    "distributed_executor_backend": ("parallel_config", "distributed_executor_backend"),
    "disable_hybrid_kv_cache_manager": ("scheduler_config", "disable_hybrid_kv_cache_manager"),
    "mamba_cache_dtype": ("cache_config", "mamba_cache_dtype"),
    "mamba_ssm_cache_dtype": ("cache_config", "mamba_ssm_cache_dtype"),
}

#: By the name of the class, which the configuration has in place of the backend's own.
BACKEND_CLASSES = {
    "FlashAttentionBackend": "FLASH_ATTN",
    "FlashInferBackend": "FLASHINFER",
    "TritonAttentionBackend": "TRITON_ATTN",
    "CPUAttentionBackend": "CPU_ATTN",
    "TritonMLABackend": "TRITON_MLA",
    "FlashMLABackend": "FLASHMLA",
    "FlashAttnMLABackend": "FLASH_ATTN_MLA",
}


@dataclass(frozen=True)
class Told:
    """A value, and the address that it is from."""

    value: Any
    where: str


@dataclass
class Answers:
    """What an engine has said.

    Attributes:
        options: of ``vllm serve``, with underscores.
        about: of the section of kvpatch's own.
        environment: the variables that a plan reads; None where it tells none.
        shows_kvpatch: whether it shows metrics of kvpatch's; None where it would not in any case.
        shows_connector: whether it shows metrics of NixlConnector's; None likewise.
        silences: why something is not told, a sentence each.
    """

    url: str
    version: str
    facts: ReleaseFacts
    options: dict[str, Told] = field(default_factory=dict)
    about: dict[str, Told] = field(default_factory=dict)
    environment: dict[str, Told] | None = None
    shows_kvpatch: bool | None = None
    shows_connector: bool | None = None
    silences: list[str] = field(default_factory=list)


def ask(url: str) -> Answers:
    """What the engine says whose API server is there.

    Raises:
        BadOptions: that is no URL.
        RequestFailed: nobody answers there, or it is no vLLM.
        ReleaseNotKnown: it is none of kvpatch's releases.
    """
    url = url.rstrip("/")
    stated = answer_of(url, VERSION)
    version = _json(stated).get("version") if stated.is_ok else None
    if not isinstance(version, str):
        raise RequestFailed(
            f"{stated.address} answers HTTP {stated.status} without a version: this is no API "
            "server of vLLM's, or something stands before it",
            "give the engine's own URL",
        )
    found = Answers(url, version, facts_of(version, settings.generation_override()))
    found.about["release"] = Told(version, stated.address)
    _read_models(found, answer_of(url, MODELS))
    _read_metrics(found, answer_of(url, METRICS))
    _read_server_info(found, answer_of(url, SERVER_INFO, _SERVER_INFO_SECONDS))
    return found


def _json(answer: Answer) -> Mapping[str, Any]:
    """An object, or nothing in place of what is none."""
    try:
        found = json.loads(answer.text)
    except (json.JSONDecodeError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


# --- which model it serves ------------------------------------------------------------


def _read_models(found: Answers, answer: Answer) -> None:
    if answer.status in _NOT_ALLOWED:
        found.silences.append(f"{answer.address} asks for an API key")
        return
    listed = _json(answer).get("data") if answer.is_ok else None
    if not isinstance(listed, list):
        listed = []
    models = [one for one in listed if isinstance(one, Mapping)]
    # Adapters have a parent; one model may be served under several names.
    roots = {str(one["root"]) for one in models if one.get("parent") is None and "root" in one}
    if len(roots) == 1:
        found.options["model"] = Told(roots.pop(), answer.address)
    else:
        found.silences.append(f"{answer.address} names no one model (HTTP {answer.status})")


# --- its cache, and whose metrics it shows --------------------------------------------


def _read_metrics(found: Answers, answer: Answer) -> None:
    caches = list(samples_of(answer.text, CACHE_INFO)) if answer.is_ok else []
    if not caches:
        found.silences.append(
            f"{answer.address} has no {CACHE_INFO} (HTTP {answer.status}; --disable-log-stats "
            "leaves it out)"
        )
        return
    where = f"{answer.address} {CACHE_INFO}"
    for label in CACHE_LABELS:
        values = sorted({labels.get(label, _NONE) for labels in caches})
        if len(values) > 1:
            raise RequestFailed(
                f"{where} has {label} {' and '.join(map(shown, values))}: the engines behind it "
                "differ, and a plan is of one",
                "give the URL of one engine",
            )
    _read_cache(found, {label: _value(text) for label, text in caches[0].items()}, where)
    if found.facts.stats is None:
        return
    found.shows_connector = "\nvllm:nixl_" in answer.text
    found.shows_kvpatch = "\nkvpatch_" in answer.text or (False if found.shows_connector else None)


def _value(text: str) -> Any:
    """As the configuration has what a label has as text."""
    if text == _NONE:
        return None
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isascii() and text.isdigit() else text


def _read_cache(found: Answers, values: Mapping[str, Any], where: str) -> None:
    """Workers choose a block size where nobody asks for one, and may not tell the API server."""
    is_chosen = values.get(IS_ASKED_FOR) is False and not found.facts.tells_chosen_block_size
    for label, option in CACHE_LABELS.items():
        value = values.get(label)
        if value is not None and not (label == "block_size" and is_chosen):
            found.options.setdefault(option, Told(value, where))
    silence = (
        f"vLLM {found.facts.release} does not tell its API server the block size that its workers "
        "have chosen"
    )
    if is_chosen and silence not in found.silences:
        found.silences.append(silence)


# --- the whole configuration ----------------------------------------------------------


def _read_server_info(found: Answers, answer: Answer) -> None:
    content = _json(answer) if answer.is_ok else {}
    configuration = content.get("vllm_config")
    if not isinstance(configuration, Mapping):
        why = (
            "vLLM <= 0.10 has it as text alone"
            if answer.is_ok
            else f"HTTP {answer.status}: vLLM has it with VLLM_SERVER_DEV_MODE=1 alone, which is "
            "not for production"
        )
        found.silences.append(f"{answer.address} does not tell its configuration ({why})")
        return
    cache = configuration.get("cache_config")
    _read_cache(found, cache if isinstance(cache, Mapping) else {}, answer.address)
    for option, value in _configured(configuration):
        found.options.setdefault(option, Told(value, answer.address))
    machine = content.get("system_env")
    about = _about(configuration, machine if isinstance(machine, Mapping) else {})
    found.about |= {name: Told(value, answer.address) for name, value in about}
    variables = content.get("vllm_env")
    if isinstance(variables, Mapping):
        names = (*VARIABLES, *(() if found.facts.grants_leases else (PATIENCE,)))
        found.environment = {
            name: Told(_variable(variables[name]), answer.address)
            for name in names
            if variables.get(name) is not None
        }
    else:
        found.silences.append(f"vLLM {found.facts.release} does not tell its variables")


def configured_options(configuration: object) -> dict[str, Any]:
    """The options that say what a configuration of vLLM's has come to, but for its connector."""
    cached = (
        (option, _at(configuration, "cache_config", label))
        for label, option in CACHE_LABELS.items()
    )
    found = {option: value for option, value in cached if value is not None}
    return found | dict(_configured(configuration))


def _configured(configuration: object) -> Iterator[tuple[str, Any]]:
    for option, path in CONFIGURED.items():
        value = _at(configuration, *path)
        if option == "dtype" and value is not None:
            yield option, str(value).removeprefix("torch.")
        elif isinstance(value, (str, int)):
            yield option, value
    if isinstance(configuration, Mapping) and "kv_transfer_config" in configuration:
        yield "kv_transfer_config", configuration["kv_transfer_config"] or {}
    method = _at(configuration, "speculative_config", "method")
    if method is not None:
        tokens = _at(configuration, "speculative_config", "num_speculative_tokens")
        stated = {} if tokens is None else {"num_speculative_tokens": tokens}
        yield "speculative_config", {"method": method, **stated}


def _about(
    configuration: Mapping[str, Any], machine: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    device = _at(configuration, "device_config", "device_type")
    device = str(device or _at(configuration, "device_config", "device")).partition(":")[0]
    hip = machine.get("hip_compiled_version", _NONE)
    if device == "cuda" and hip != _NONE:  # ROCm's devices have the name of CUDA's
        yield "platform", "cuda" if hip in (None, "N/A") else "rocm"
    elif device not in ("cuda", "auto", _NONE):
        yield "platform", device
    processor = machine.get("cpu_info")
    if device == "cpu" and isinstance(processor, str) and "avx" in processor:
        yield "amx", "amx_tile" in processor
    backend = _at(configuration, "attention_config", "backend")
    if isinstance(backend, str):
        name = backend.rpartition(".")[2]
        yield "attention-backend", BACKEND_CLASSES.get(name, name)


def _at(found: Any, *path: str) -> Any:
    """What a path of names leads to, in JSON or in vLLM's own objects; None for nothing."""
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return found


def _variable(value: Any) -> str:
    """As a shell would have it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
