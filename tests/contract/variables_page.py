"""docs/reference/variables.md: what the code that reads the variables accepts, in a table."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvpatch.core import settings
from kvpatch.core.errors import SettingsError

from .tables import ROOT, markdown

PAGE = ROOT / "docs" / "reference" / "variables.md"

_HEAD = """\
# Variables

Which variables does kvpatch read? Give all processes of one engine the same values
([Ray and several nodes](../how-to/several_nodes.md)). An unreadable value is an error when the
process starts. A warning names an unknown variable that begins with `KVPATCH_`. Written by
`python -m tests.contract --write` from the code.

"""
_TAIL = """
## Variables of other projects

| variable | what kvpatch does with it |
|---|---|
| `VLLM_PLUGINS` | must name `kvpatch` where it is set: vLLM loads no other plugins |
| `ENABLE_KVCACHED`, `KVCACHED_CONTIGUOUS_LAYOUT`, `KVCACHED_PAGE_SIZE_MB` | compares them with kvcached's tensors, and refuses contradictions ([kvcached](../how-to/kvcached.md)) |
| `UCX_TLS`, `UCX_NET_DEVICES` | tells by them whether a network card could register kvcached's memory ([kvcached's memory](../explanation/kvcached.md#network-cards)) |
| `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` | `<= 0.21`: how long P keeps blocks; a load that ends later counts as failed ([the lease](../explanation/stale_blocks.md#a-p-without-kvpatch-the-lease-by-the-clock)); set it alike on P and D |
| `VLLM_NIXL_SIDE_CHANNEL_HOST`, `VLLM_NIXL_SIDE_CHANNEL_PORT` | nothing: they are vLLM's, and say where P answers handshakes |

Experiments and tests read others, which their scripts describe: `KVPATCH_PYTHON`,
`KVPATCH_TORCH_INDEX`, `KVPATCH_TEST_RELEASES`, `KVPATCH_TEST_SHARE`, `KVPATCH_TEST_CACHE`,
`KVPATCH_TEST_FULL`.
"""  # noqa: E501

#: What each is for. Values and defaults are not here: the code is asked for them.
MEANINGS = {
    "ENABLE_KVPATCH": "turns kvpatch on; unset and empty do not",
    "KVPATCH_ACCEPT": "what P may differ in although vLLM compares it by a hash (from 0.13 on), by "
    "name, separated by commas; D then checks the rest ([rolling "
    "upgrades](../how-to/rolling_upgrades.md)). Model, data types and quantisation never are",
    "KVPATCH_ALLOWED_PEERS": "peers that clients can make D connect to: networks, addresses and "
    "host names, with or without ports, separated by commas; unset: any, as in stock vLLM "
    "([what is trusted](../explanation/security.md))",
    "KVPATCH_DIGEST": "how much of each load D compares with what P computed: nothing, a sample of "
    "its tokens, or all of them; set it on both sides "
    "([digests](../explanation/digests.md))",
    "KVPATCH_DISABLE": "[patches](patches.md) to leave out, by name, separated by commas",
    "KVPATCH_REQUIRE_TOKENS": "`true`: D computes each prompt for which P states no hashes of its "
    "tokens (P has no kvpatch, or a proxy drops `kvpatch_prompt`) "
    "([same prompt](../explanation/same_prompt.md))",
    "KVPATCH_ON_FAILED_CHECK": "what D does with a load that fails a check of kvpatch (P gave its "
    "blocks away, [digests](../explanation/digests.md) differ): computes the prompt, or fails the "
    "load by vLLM's `kv_load_failure_policy`",
    "KVPATCH_SIDE_CHANNEL_KEY": "file with the key of all engines, written by `kvpatch key FILE`: "
    "[handshakes](../explanation/security.md#the-side-channel-under-a-key) use ZeroMQ's CURVE, and "
    "a client without the key gets no answer",
    "KVPATCH_SIDE_CHANNEL_PLAIN": "`true`: also talks to engines without the key, for a roll-out",
    "KVPATCH_STAGING_BYTES": "size of each worker's [staging pool](../explanation/reading.md#"
    "direct-and-staged), beside what vLLM's `--gpu-memory-utilization` counts; made when the "
    "first staged read needs it (half or a quarter of it where the device has no memory left)",
    "KVPATCH_PROGRESS": "`step`: reads go on in the engine's steps, without an own thread; slower",
    "KVPATCH_TRANSFER": "`direct` or `staged` forces one way of reading heterogeneous caches",
    "KVPATCH_PEER_BLOCK_SIZE": "`--block-size` of every P, where handshakes do not state it "
    "(`<= 0.20`) and P has no kvpatch; D refuses a P that states another "
    "([old releases](../how-to/old_releases.md))",
    "KVPATCH_PEER_KEYS": "how every P with the CPU backend keeps bfloat16: `tiles` on a processor "
    "with AMX, `columns` on another x86 processor; not needed where P has kvpatch. A wrong value "
    "gives wrong tokens "
    "([which backends fit](../how-to/rolling_upgrades.md#which-backends-fit))",
    "KVPATCH_PEER_LAYOUT": "layout of every P (0.10.0)",
    "KVPATCH_HOST_BUFFER": "`auto` sends KV through a [buffer in host "
    "memory](../how-to/host_buffer.md) where NIXL cannot register the device's and vLLM has no "
    "host buffer of its own for it, `always` everywhere, `never` nowhere",
    "KVPATCH_HOST_BUFFER_BYTES": "size of each worker's host buffer, at most the device's cache",
    "KVPATCH_KVCACHED_CARDS": "`refuse`: refuses kvcached's memory where a network card could "
    "register it; `trust`: registers it ([kvcached](../how-to/kvcached.md))",
    "KVPATCH_GENERATION": "release or generation to take this vLLM for, whatever its code is "
    "([other builds](other_builds.md))",
    "KVPATCH_LOG_LEVEL": "for kvpatch's own loggers; unset leaves them as they are",
}

_NONSENSE = "?!"


def names() -> list[str]:
    """The variables that engines read, as the code has them."""
    found = {
        value
        for name, value in vars(settings).items()
        if name.isupper() and isinstance(value, str) and re.match("KVPATCH_|ENABLE_KVPATCH", value)
    }
    return sorted(found - set(settings.TOOLING), key=list(MEANINGS).index)


def page() -> str:
    """The whole document."""
    rows = []
    for name in names():
        values, default = _asked(name)
        rows.append((f"`{name}`", values, default, MEANINGS[name]))
    return _HEAD + markdown(("variable", "values", "default", "meaning"), rows) + _TAIL


def _asked(name: str) -> tuple[str, str]:
    """(values, default), by what the reader of a variable makes of nonsense and of nothing."""
    for reader in _readers():
        with _environment({}):
            default = reader()
        with _environment({name: _NONSENSE}):
            try:
                found = reader()
            except SettingsError as error:
                if str(error).startswith(f"{name}="):
                    return _values(str(error)), _shown(default)
            else:
                if _NONSENSE in (found if isinstance(found, tuple) else (found,)):
                    return "text", _shown(default)
    raise LookupError(f"nothing reads {name}")


def _readers() -> Iterator[Callable[[], Any]]:
    for name, function in vars(settings).items():
        if inspect.isfunction(function) and not name.startswith("_"):  # noqa: SIM102
            if not inspect.signature(function).parameters:
                yield function


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("KVPATCH_", "ENABLE_KV"))}
    with mock.patch.dict(os.environ, kept | variables, clear=True):
        yield


def _values(complaint: str) -> str:
    found = re.search(r" is (?:not one of|not|neither) ([^:]+)", complaint)
    if found is None:
        raise LookupError(f"no values in {complaint!r}")
    words = found[1].replace(" nor ", ", ")
    return words if words.startswith("a ") else f"`{'`, `'.join(words.split(', '))}`"


def _shown(default: object) -> str:
    if default in (None, (), ""):
        return "unset"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int):
        return f"`{default}` ({default >> 20} MiB)"
    return f"`{default}`"
