"""The only reader of settings in ``os.environ``; the entry point asks whether one is set.

The gate may be read by every vLLM process, so the module imports
nothing but ``os`` until a setting is really asked for.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar

    from kvpatch.core.errors import SettingsError

    T = TypeVar("T")

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
SIDE_CHANNEL_KEY = "KVPATCH_SIDE_CHANNEL_KEY"
SIDE_CHANNEL_PLAIN = "KVPATCH_SIDE_CHANNEL_PLAIN"
STAGING_BYTES = "KVPATCH_STAGING_BYTES"
TRANSFER = "KVPATCH_TRANSFER"
PROGRESS = "KVPATCH_PROGRESS"

#: Read outside the engines: by the experiments and by the test suite.
TOOLING = (
    *("KVPATCH_PYTHON", "KVPATCH_TORCH_INDEX", "KVPATCH_TEST_CACHE", "KVPATCH_TEST_FULL"),
    *("KVPATCH_TEST_RELEASES", "KVPATCH_TEST_SHARE"),
)

#: The beginnings of variables of vLLM, kvpatch and kvcached.
OURS = ("VLLM_", "KVPATCH_", "ENABLE_KV")

#: What may differ at a peer, and what never may: there the same bytes mean something else.
_ACCEPTABLE = ("vllm_version", "attn_backend")
_CHANGES_BYTES = (
    *("model", "dtype", "quantization", "quantisation", "cache_dtype", "kv_cache_dtype"),
    *("num_kv_heads", "head_size", "num_hidden_layers", "speculative_config"),
)
DEFAULT_STAGING_BYTES = 256 * 1024**2
#: A secret key of CURVE's, 32 bytes as Z85 writes them.
_KEY_LETTERS = 40
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
#: The last five letters that stand for four bytes.
_Z85_LAST = "%nSc0"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


# --- how a text is read ---------------------------------------------------------------------

#: What reads the text of each variable.
_PARSERS: dict[str, Callable[[str, str], object]] = {}


def _setting(name: str, parse: Callable[[str, str], T]) -> Callable[[], T]:
    """Returns what reads a variable; `parse` gets its name and its text, empty where unset."""

    def read() -> T:
        return parse(name, os.environ.get(name, "").strip())

    _PARSERS[name] = parse
    return read


def _settings_error(reason: str, cure: str) -> SettingsError:
    from kvpatch.core.errors import SettingsError

    return SettingsError(reason, cure)


def _choice(*choices: str) -> Callable[[str, str], str]:
    """Reads one of the choices; the first where nothing is set."""
    declared = _declared(*choices)
    return lambda name, text: declared(name, text) or choices[0]


def _declared(*choices: str) -> Callable[[str, str], str | None]:
    """Reads one of the choices; None where nothing is set."""

    def parse(name: str, text: str) -> str | None:
        found = text.upper() if choices[0].isupper() else text.lower()
        if found and found not in choices:
            raise _settings_error(
                f"{name}={found!r} is not one of {', '.join(choices)}",
                "set one of them, or unset it",
            )
        return found or None

    return parse


def _boolean(name: str, text: str) -> bool:
    """False where a variable is unset or empty."""
    found = _BOOLEANS.get(text.lower()) if text else False
    if found is None:
        raise _settings_error(
            f"{name}={text!r} is neither true, 1, false nor 0", "set one of them, or unset it"
        )
    return found


def _bytes(default: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        if not _is_count(text):
            raise _settings_error(
                f"{name}={text!r} is not a whole number of bytes above 0",
                f"set one ({default} say), or unset it",
            )
        return int(text or default)

    return parse


def _tokens(name: str, text: str) -> int | None:
    if not _is_count(text):
        raise _settings_error(
            f"{name}={text!r} is not a whole number of tokens",
            "set the --block-size of P, or unset it",
        )
    return int(text) if text else None


def _is_count(text: str) -> bool:
    """True of a whole number above 0, and of nothing at all."""
    return not text or (text.isascii() and text.isdigit() and int(text) > 0)


def _key(name: str, path: str) -> str:
    """The key in a file."""
    if not path:
        return ""
    from pathlib import Path

    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _settings_error(
            f"{name}={path!r} is not a file that can be read: {error}",
            f"name a file that `kvpatch key FILE` has written, or unset {name}",
        ) from error
    # As ZMQ takes it.
    digits = [_Z85.find(letter) for letter in key]
    last = [_Z85.index(letter) for letter in _Z85_LAST]
    fives = [digits[at : at + 5] for at in range(0, len(key), 5)]
    if len(key) != _KEY_LETTERS or min(digits) < 0 or max(fives) > last:
        raise _settings_error(
            f"{name}={path!r} is not a file with a key in it",
            f"name a file that `kvpatch key FILE` has written, or unset {name}",
        )
    return key


def listed(text: str) -> tuple[str, ...]:
    """The names that a variable lists, by commas or spaces, each once."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def _factors(variable: str, text: str) -> tuple[str, ...]:
    names = listed(text.lower())
    for name in names:
        if name in _CHANGES_BYTES:
            raise _settings_error(
                f"{variable}={name!r} can never be accepted, for with another one bytes mean "
                "something else",
                "use one on both sides",
            )
        _declared(*_ACCEPTABLE)(variable, name)
    return names


# --- the settings ---------------------------------------------------------------------------

#: True where ``ENABLE_KVPATCH`` asks for kvpatch; unset and empty do not.
is_enabled = _setting(ENABLE, _boolean)
#: The factors in which a peer may differ from this engine.
accepted_factors = _setting(ACCEPT, _factors)
#: The peers that are allowed, as written there; none for any peer.
allowed_peers = _setting(ALLOWED_PEERS, lambda _, text: listed(text))
#: How much of a load is proven by digests.
digest = _setting(DIGEST, _choice("off", "sample", "all"))
#: The patches that are turned off, as written there.
disabled_slugs = _setting(DISABLE, lambda _, text: listed(text))
#: The release or generation to assume for a vLLM build that the release table lacks.
generation_override = _setting(GENERATION, lambda _, text: text or None)
#: When KV caches go through host memory.
host_buffer = _setting(HOST_BUFFER, _choice("auto", "always", "never"))
#: The most that a worker's host buffer may take; no more than its KV cache takes is used.
host_buffer_bytes = _setting(HOST_BUFFER_BYTES, _bytes(4 * 1024**3))
#: What becomes of kvcached's memory where a card may register it.
kvcached_cards = _setting(KVCACHED_CARDS, _choice("refuse", "trust"))
#: The level for kvpatch's own loggers; None leaves them alone.
log_level = _setting(LOG_LEVEL, _declared("DEBUG", "INFO", "WARNING", "ERROR"))
#: What becomes of a load that a check fails: ``fail`` is as a transfer does.
on_failed_check = _setting(ON_FAILED_CHECK, _choice("recompute", "fail"))
#: The tokens of a block of every P, as the operator declares them; None where unset.
peer_block_size = _setting(PEER_BLOCK_SIZE, _tokens)
#: How every P on a CPU has its keys, as the operator declares it.
peer_keys = _setting(PEER_KEYS, _declared("columns", "tiles"))
#: The layout of every P's cache, as the operator declares it.
peer_layout = _setting(PEER_LAYOUT, _declared("HND", "NHD"))
#: What reads go on in: a thread of their own where it can be, or the engine's steps.
progress = _setting(PROGRESS, _choice("auto", "step"))
#: True if D loads no prompt of whose tokens P states no hashes.
requires_tokens = _setting(REQUIRE_TOKENS, _boolean)
#: The side channel's key; empty for none.
side_channel_key = _setting(SIDE_CHANNEL_KEY, _key)
#: True if engines without the key are talked to as well, while it is rolled out.
side_channel_plain = _setting(SIDE_CHANNEL_PLAIN, _boolean)
#: The size of a worker's staging pool.
staging_bytes = _setting(STAGING_BYTES, _bytes(DEFAULT_STAGING_BYTES))
#: How unlike caches are read.
transfer_mode = _setting(TRANSFER, _choice("auto", "direct", "staged"))

#: All that engines read, but for :data:`ENABLE`.
NAMES = tuple(sorted(_PARSERS.keys() - {ENABLE}))


# --- variables of others --------------------------------------------------------------------


def is_kvcached_enabled() -> bool:
    """True where kvcached allocates the KV cache in this process.

    kvcached reads the variable the same way and takes every other value for no.
    """
    return os.environ.get("ENABLE_KVCACHED", "").lower() in ("true", "1")


def kvcached_contiguous() -> bool | None:
    """``KVCACHED_CONTIGUOUS_LAYOUT``, read as kvcached reads it; None where unset."""
    value = os.environ.get("KVCACHED_CONTIGUOUS_LAYOUT")
    return None if value is None else value.lower() == "true"


def kvcached_page_bytes() -> int | None:
    """``KVCACHED_PAGE_SIZE_MB``; None where unset, or no number (kvcached refuses)."""
    value = os.environ.get("KVCACHED_PAGE_SIZE_MB", "")
    return int(value) * 1024**2 if value.isascii() and value.isdigit() else None


def variable(name: str) -> str | None:
    """A variable of vLLM's, UCX's or Hugging Face's; None where unset."""
    return os.environ.get(name)


# --- what is said of them -------------------------------------------------------------------


def engine_variables() -> dict[str, str]:
    """The variables of vLLM, kvpatch and kvcached that an engine of this environment reads."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(OURS) and name not in TOOLING
    }


def set_variables(given: Mapping[str, str]) -> None:
    """Sets variables of this process, for the vLLM that it imports."""
    os.environ.update(given)


def to_copy() -> tuple[str, ...]:
    """Returns the variables of this process that every process of an engine must have."""
    return tuple(n for n in os.environ if n == ENABLE or n.startswith("KVPATCH_"))


def check() -> None:
    """Reads every variable, so that a value which cannot be taken ends no engine that serves.

    Raises:
        SettingsError: one cannot be taken.
    """
    for name, parse in _PARSERS.items():
        if name != SIDE_CHANNEL_KEY:  # a file, which is read where a connector is imported
            parse(name, os.environ.get(name, "").strip())


def errors(given: Mapping[str, str] | None = None) -> list[str]:
    """Returns a sentence for every variable whose value kvpatch cannot take.

    Args:
        given: the variables of another process; None for those of this one.
    """
    from kvpatch.core.errors import SettingsError

    variables = os.environ if given is None else given
    found = []
    for name, parse in _PARSERS.items():
        try:
            parse(name, variables.get(name, "").strip())
        except SettingsError as error:
            found.append(str(error))
    return found


def complaints(slugs: Iterable[str]) -> list[str]:
    """Returns a sentence for every unknown variable or slug, with the nearest known one."""
    found = []
    for name in sorted(os.environ):
        if name.startswith("KVPATCH_") and name not in NAMES + TOOLING:
            found.append(f"{name} is no variable of kvpatch{_nearest(name, NAMES)}")
    known = tuple(slugs)
    for slug in disabled_slugs():
        if slug not in known:
            found.append(f"{DISABLE} names {slug!r}, which is no patch{_nearest(slug, known)}")
    return found


def _nearest(name: str, real: tuple[str, ...]) -> str:
    import difflib

    matches = difflib.get_close_matches(name, real, n=1)
    return f"; did you mean {matches[0]}?" if matches else f"; there are {', '.join(real)}"
