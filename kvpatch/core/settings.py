"""The only reader of settings in ``os.environ``; the entry point asks whether one is set.

The gate may be read by every vLLM process, so the module imports
nothing but ``os`` until a setting is really asked for.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvpatch.core.errors import SettingsError

ACCEPT = "KVPATCH_ACCEPT"
ALLOWED_PEERS = "KVPATCH_ALLOWED_PEERS"
ENABLE = "ENABLE_KVPATCH"
DIGEST = "KVPATCH_DIGEST"
DISABLE = "KVPATCH_DISABLE"
GENERATION = "KVPATCH_GENERATION"
HOST_BUFFER = "KVPATCH_HOST_BUFFER"
HOST_BUFFER_BYTES = "KVPATCH_HOST_BUFFER_BYTES"
KVCACHED_CARDS = "KVPATCH_KVCACHED_CARDS"
LOG_LEVEL = "KVPATCH_LOG_LEVEL"
ON_FAILED_CHECK = "KVPATCH_ON_FAILED_CHECK"
PEER_BLOCK_SIZE = "KVPATCH_PEER_BLOCK_SIZE"
PEER_KEYS = "KVPATCH_PEER_KEYS"
PEER_LAYOUT = "KVPATCH_PEER_LAYOUT"
REQUIRE_TOKENS = "KVPATCH_REQUIRE_TOKENS"
STAGING_BYTES = "KVPATCH_STAGING_BYTES"
TRANSFER = "KVPATCH_TRANSFER"
PROGRESS = "KVPATCH_PROGRESS"
UNSTATED_LAYOUT = "KVPATCH_UNSTATED_LAYOUT"
WITNESS = "KVPATCH_WITNESS"

#: All that engines read, but for :data:`ENABLE`.
NAMES = (
    ACCEPT,
    ALLOWED_PEERS,
    DIGEST,
    DISABLE,
    GENERATION,
    HOST_BUFFER,
    HOST_BUFFER_BYTES,
    KVCACHED_CARDS,
    LOG_LEVEL,
    ON_FAILED_CHECK,
    PEER_BLOCK_SIZE,
    PEER_KEYS,
    PEER_LAYOUT,
    PROGRESS,
    REQUIRE_TOKENS,
    STAGING_BYTES,
    TRANSFER,
    UNSTATED_LAYOUT,
    WITNESS,
)
#: Read outside the engines: by the experiments and by the test suite.
TOOLING = (
    "KVPATCH_PYTHON",
    "KVPATCH_TORCH_INDEX",
    "KVPATCH_TEST_CACHE",
    "KVPATCH_TEST_FULL",
    "KVPATCH_TEST_RELEASES",
    "KVPATCH_TEST_SHARE",
)

#: What may differ at a peer, and what never may: there the same bytes mean something else.
_ACCEPTABLE = ("vllm_version", "attn_backend")
_CHANGES_BYTES = (
    *("model", "dtype", "quantization", "quantisation", "cache_dtype", "kv_cache_dtype"),
    *("num_kv_heads", "head_size", "num_hidden_layers", "speculative_config"),
)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_DIGESTS = ("off", "sample", "all")
_HOST_BUFFERS = ("auto", "always", "never")
_KVCACHED_CARDS = ("refuse", "trust")
_KEYS = ("columns", "tiles")
_LAYOUTS = ("HND", "NHD")
_ON_FAILED_CHECK = ("recompute", "fail")
TRANSFERS = ("auto", "direct", "staged")
_PROGRESSES = ("auto", "step")
_UNSTATED_LAYOUTS = ("prove", "same")
_WITNESSES = ("off", "log", "enforce")
_DEFAULT_HOST_BUFFER_BYTES = 4 * 1024**3
DEFAULT_STAGING_BYTES = 256 * 1024**2
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def is_enabled() -> bool:
    """Whether ``ENABLE_KVPATCH`` asks for kvpatch; unset and empty do not."""
    return _boolean(ENABLE)


def is_kvcached_enabled() -> bool:
    """Whether kvcached allocates the KV cache in this process.

    kvcached reads the variable the same way and takes every other value for no.
    """
    return os.environ.get("ENABLE_KVCACHED", "").lower() in ("true", "1")


def kvcached_contiguous() -> bool | None:
    """What ``KVCACHED_CONTIGUOUS_LAYOUT`` says, read as kvcached reads it; None where unset."""
    value = os.environ.get("KVCACHED_CONTIGUOUS_LAYOUT")
    return None if value is None else value.lower() == "true"


def kvcached_page_bytes() -> int | None:
    """What ``KVCACHED_PAGE_SIZE_MB`` says; None where unset, or no number (kvcached refuses)."""
    value = os.environ.get("KVCACHED_PAGE_SIZE_MB", "")
    return int(value) * 1024**2 if value.isascii() and value.isdigit() else None


def vllm_plugins() -> str | None:
    """``VLLM_PLUGINS``, the only plugins that vLLM loads, by commas; None where it loads all."""
    return os.environ.get("VLLM_PLUGINS")


def ucx_transports() -> str | None:
    """``UCX_TLS``, which tells UCX what to use; None where unset."""
    return os.environ.get("UCX_TLS")


def ucx_net_devices() -> str | None:
    """``UCX_NET_DEVICES``, which tells UCX on which devices; None where unset."""
    return os.environ.get("UCX_NET_DEVICES")


def hub_folders() -> tuple[str | None, str | None]:
    """``HF_HUB_CACHE`` and ``HF_HOME``, which say where the hub's models lie; None where unset."""
    return os.environ.get("HF_HUB_CACHE") or None, os.environ.get("HF_HOME") or None


def listed(text: str) -> tuple[str, ...]:
    """The names that a variable lists, by commas or spaces, each once."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def disabled_slugs() -> tuple[str, ...]:
    """The patches that ``KVPATCH_DISABLE`` turns off, as written there."""
    return listed(os.environ.get(DISABLE, ""))


def accepted_factors() -> tuple[str, ...]:
    """The factors that ``KVPATCH_ACCEPT`` lists, in which a peer may differ from this engine."""
    names = listed(os.environ.get(ACCEPT, ""))
    for name in names:
        if name in _CHANGES_BYTES:
            raise _settings_error(
                f"{ACCEPT}={name!r} can never be accepted, for with another one bytes mean "
                "something else",
                "use one on both sides",
            )
        _check_choice(ACCEPT, name, _ACCEPTABLE)
    return names


def allowed_peers() -> tuple[str, ...]:
    """The entries of ``KVPATCH_ALLOWED_PEERS``, as written there; none for any peer."""
    return tuple(os.environ.get(ALLOWED_PEERS, "").replace(",", " ").split())


def digest() -> str:
    """How much of a load is proven by digests: ``off``, a ``sample``, or ``all``."""
    return _choice(DIGEST, _DIGESTS)


def generation_override() -> str | None:
    """The release or generation to assume for a vLLM build that the release table lacks."""
    return os.environ.get(GENERATION) or None


def log_level() -> str | None:
    """The level for kvpatch's own loggers, or None to leave them alone."""
    value = os.environ.get(LOG_LEVEL, "").upper()
    if value:
        _check_choice(LOG_LEVEL, value, _LOG_LEVELS)
    return value or None


def host_buffer() -> str:
    """When KV caches go through host memory: ``auto``, ``always`` or ``never``."""
    return _choice(HOST_BUFFER, _HOST_BUFFERS)


def host_buffer_bytes() -> int:
    """The most that a worker's host buffer may take; no more than its KV cache takes is used."""
    return _byte_count(HOST_BUFFER_BYTES, _DEFAULT_HOST_BUFFER_BYTES)


def kvcached_cards() -> str:
    """What becomes of kvcached's memory where a card may register it: ``refuse`` or ``trust``."""
    return _choice(KVCACHED_CARDS, _KVCACHED_CARDS)


def on_failed_check() -> str:
    """What becomes of a load that a check fails: ``recompute``, or ``fail`` as a transfer does."""
    return _choice(ON_FAILED_CHECK, _ON_FAILED_CHECK)


def peer_block_size() -> int | None:
    """Tokens of a block of every P, as the operator declares them; None where unset."""
    value = os.environ.get(PEER_BLOCK_SIZE, "")
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise _settings_error(
            f"{PEER_BLOCK_SIZE}={value!r} is not a whole number of tokens",
            "set the --block-size of P, or unset it",
        )
    return int(value)


def peer_keys() -> str | None:
    """How every P on a CPU has its keys, as the operator declares it; None where unset."""
    value = os.environ.get(PEER_KEYS, "").lower()
    if value:
        _check_choice(PEER_KEYS, value, _KEYS)
    return value or None


def peer_layout() -> str | None:
    """The layout of every P's cache, as the operator declares it; None where unset."""
    value = os.environ.get(PEER_LAYOUT, "").upper()
    if value:
        _check_choice(PEER_LAYOUT, value, _LAYOUTS)
    return value or None


def requires_tokens() -> bool:
    """True if D loads no prompt of whose tokens P states no hashes."""
    return _boolean(REQUIRE_TOKENS)


def staging_bytes() -> int:
    """The size of a worker's staging pool."""
    return _byte_count(STAGING_BYTES, DEFAULT_STAGING_BYTES)


def transfer_mode() -> str:
    """How unlike caches are read: ``auto``, ``direct`` or ``staged``."""
    return _choice(TRANSFER, TRANSFERS)


def progress() -> str:
    """What reads go on in: ``auto``, a thread of their own where it can be, or ``step``."""
    return _choice(PROGRESS, _PROGRESSES)


def unstated_layout() -> str:
    """What becomes of a peer whose handshake states no layout (0.10.0): ``prove`` or ``same``."""
    return _choice(UNSTATED_LAYOUT, _UNSTATED_LAYOUTS)


def witness() -> str:
    """What is done about a load that D's own last token speaks against: ``off`` looks at none."""
    return _choice(WITNESS, _WITNESSES)


def engine_variables() -> dict[str, str]:
    """The variables of vLLM, kvpatch and kvcached that an engine of this environment reads."""
    ours = ("VLLM_", "KVPATCH_", "ENABLE_KV")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ours) and name not in TOOLING
    }


def set_variables(given: Mapping[str, str]) -> None:
    """Sets variables of this process, for the vLLM that it imports."""
    os.environ.update(given)


def to_copy() -> tuple[str, ...]:
    """What of this process's variables every process of an engine must have."""
    return tuple(n for n in os.environ if n == ENABLE or n.startswith("KVPATCH_"))


def errors() -> list[str]:
    """One sentence for every variable whose value kvpatch cannot take."""
    from kvpatch.core.errors import SettingsError

    readers: tuple[Callable[[], object], ...] = (
        *(is_enabled, log_level, accepted_factors, digest, requires_tokens, witness),
        *(host_buffer, host_buffer_bytes, kvcached_cards, staging_bytes, transfer_mode, progress),
        *(peer_block_size, peer_keys, peer_layout, unstated_layout, on_failed_check),
    )
    found = []
    for read in readers:
        try:
            read()
        except SettingsError as error:
            found.append(str(error))
    return found


def complaints(slugs: Iterable[str]) -> list[str]:
    """One sentence for every variable or slug that nobody reads, with the nearest real one."""
    found = []
    for name in sorted(os.environ):
        if name.startswith("KVPATCH_") and name not in NAMES + TOOLING:
            found.append(f"{name} is no variable of kvpatch{_nearest(name, NAMES)}")
    known = tuple(slugs)
    for slug in disabled_slugs():
        if slug not in known:
            found.append(f"{DISABLE} names {slug!r}, which is no patch{_nearest(slug, known)}")
    return found


def _byte_count(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise _settings_error(
            f"{name}={value!r} is not a whole number of bytes above 0",
            f"set one ({default} say), or unset it",
        )
    return int(value)


def _boolean(name: str) -> bool:
    """False where a variable is unset or empty."""
    value = os.environ.get(name, "")
    if not value:
        return False
    try:
        return _BOOLEANS[value.strip().lower()]
    except KeyError:
        raise _settings_error(
            f"{name}={value!r} is neither true, 1, false nor 0", "set one of them, or unset it"
        ) from None


def _choice(name: str, choices: tuple[str, ...]) -> str:
    """One of the choices, the first where nothing is set."""
    value = os.environ.get(name, "").lower() or choices[0]
    _check_choice(name, value, choices)
    return value


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _settings_error(
            f"{name}={value!r} is not one of {', '.join(choices)}", "set one of them, or unset it"
        )


def _settings_error(reason: str, cure: str) -> SettingsError:
    from kvpatch.core.errors import SettingsError

    return SettingsError(reason, cure)


def _nearest(name: str, real: tuple[str, ...]) -> str:
    import difflib

    matches = difflib.get_close_matches(name, real, n=1)
    return f"; did you mean {matches[0]}?" if matches else f"; there are {', '.join(real)}"
