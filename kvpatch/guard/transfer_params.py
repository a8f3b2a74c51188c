"""The checks of ``kv_transfer_params``, which a client sends, before the release sees them.

The release takes these fields to come from its own P. A missing field, a text for a number or an
id of 10**20 ends its engine, here or two processes on. kvpatch checks types, ranges, lengths and
required fields, of the fields that this release reads. It lets everything pass where nothing
would be loaded. These checks do not prove that a field is true: a client that may send requests
may name any block of any peer that D can reach (docs/explanation/security.md).

Some proxies have types of their own. They send null for fields that P did not send, and texts or
floats for numbers. kvpatch normalizes values that have only one meaning.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpatch.core.errors import AS_ANSWERED, ParamsRefused
from kvpatch.core.releases import ReleaseFacts
from kvpatch.core.text import shown

FIELD = "kv_transfer_params"
_BLOCKS = "remote_block_ids"
_REQUEST_ID = "remote_request_id"
_ADDRESS = ("remote_engine_id", "remote_host", "remote_port")

#: A prompt's lists may go on behind its tokens: drafted ones, states.
_MORE_BLOCKS = 64
_MOST_GROUPS = 256
_MOST_RANKS = 1024
_MOST_ID = 2**31 - 1
_MOST_SECONDS = 1e15
_ENGINE_ID_LENGTH = 1024
_REQUEST_ID_LENGTH = 8192
_HOST_LENGTH = 256
_HOST = re.compile(r"[0-9A-Za-z_.:%\[\]-]+")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
#: The least and the most that a number may be; ``remote_num_tokens`` kvpatch reads everywhere.
_NUMBERS = {
    **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), (1, _MOST_RANKS)),
    "remote_num_tokens": (0, _MOST_ID),
    "remote_registration_generation": (0, _MOST_ID),
}
#: Of which a 0 is what a typed proxy makes of none; the release has a default.
_OPTIONAL_SIZES = ("dcp_size", "pp_size")
_EXPIRY = "remote_blocks_expiry_time"
_MOONCAKES = "transfer_id"
#: What P's workers take for messages of another kind.
_NOT_READS = ("HB:", "PUSH_REG:")


@dataclass(frozen=True)
class RequestLimits:
    """The limits that a request's parameters are checked against.

    Attributes:
        max_model_len: the most tokens that a prompt of this engine may have.
        is_push: True if P writes, so that the request names no blocks of P's (from 0.24).
        allows_peer: True if D may connect to a host and a port.
    """

    max_model_len: int
    is_push: bool = False
    allows_peer: Callable[[str, int], bool] = lambda host, port: True


def is_load(params: Mapping[str, Any], facts: ReleaseFacts) -> bool:
    """True if blocks of a peer's would be loaded, by D or, of an earlier turn, by P.

    P takes an earlier turn that is not all there for none.
    """
    if params.get("do_remote_prefill"):
        return True
    is_turn = facts.reads_back and params.get("do_remote_decode") and params.get(_BLOCKS)
    return bool(is_turn) and all(name in params for name in (*_ADDRESS, _REQUEST_ID))


def _is_empty_turn(params: Mapping[str, Any]) -> bool:
    """True of a typed proxy's request to P, which has all fields and no earlier turn."""
    if params.get("do_remote_prefill") or not params.get("do_remote_decode"):
        return False
    has_address = all(params.get(name) for name in (*_ADDRESS, _REQUEST_ID))
    return not has_address and _is_empty(params.get(_BLOCKS))


def is_of_another(params: object) -> bool:
    """True if a load's parameters are Mooncake's (from 0.16), which ends such a request itself."""
    if not (isinstance(params, dict) and params.get("do_remote_prefill")):
        return False
    ours = ("remote_host", "remote_port", _BLOCKS)
    return bool(params.get(_MOONCAKES)) and all(params.get(name) is None for name in ours)


def loads_nothing(params: Mapping[str, Any], *, reads_back: bool) -> bool:
    """True if nothing comes of a load that the release announces, and waits for.

    Args:
        reads_back: whether this engine loads earlier turns (and has not loaded this one).
    """
    if params.get("do_remote_prefill"):
        return _is_empty(params.get(_BLOCKS))
    return not reads_back or bool(params.get("_remote_blocks_processed"))


def _is_empty(blocks: object) -> bool:
    """True if a peer says that it holds nothing: an empty list, or one of empty ones."""
    return isinstance(blocks, list | tuple) and not any(
        not isinstance(group, list | tuple) or group for group in blocks
    )


def checked(params: object, facts: ReleaseFacts, limits: RequestLimits) -> dict[str, Any] | None:
    """The parameters as the release can take them.

    Raises:
        ParamsRefused: the release cannot take these; the message names the field.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ParamsRefused(f"{FIELD} is {shown(params)}, not an object", AS_ANSWERED)
    found = completed(params, facts)
    if is_load(found, facts):
        _check_load(found, facts, limits)
    return found


def _check_load(params: Mapping[str, Any], facts: ReleaseFacts, limits: RequestLimits) -> None:
    # Where P writes, D may be asked before P has answered, and looks at no name of P's.
    is_unnamed = limits.is_push and params.get(_REQUEST_ID, 0) in (None, "")
    has_name = facts.names_remote_request and not is_unnamed
    request_id = (_REQUEST_ID,) if has_name else ()
    for name in (*_ADDRESS, *request_id, "tp_size" if limits.is_push else _BLOCKS):
        if params.get(name) is None:
            what = "null" if name in params else "missing"
            raise ParamsRefused(f"{FIELD}.{name} is {what}", AS_ANSWERED)
    host, port = params["remote_host"], params["remote_port"]
    _check_text("remote_engine_id", params["remote_engine_id"], _ENGINE_ID_LENGTH)
    if has_name:
        # It has what P's client made of it (X-Request-Id).
        _check_text(_REQUEST_ID, params[_REQUEST_ID], _REQUEST_ID_LENGTH, but=("Cs",))
        if params[_REQUEST_ID].startswith(_NOT_READS):
            _refuse(_REQUEST_ID, params[_REQUEST_ID], "the name of a request")
    _check_text("remote_host", host, _HOST_LENGTH)
    if not _HOST.fullmatch(host):
        _refuse("remote_host", host, "a host's name or address")
    _check_number("remote_port", port, 1, 65535)
    if not limits.allows_peer(host, port):
        raise ParamsRefused(
            f"{FIELD}.remote_host {shown(host)} with port {port} is not among the peers that "
            "KVPATCH_ALLOWED_PEERS lists (a name is compared with names, an address with networks)",
            "have the operator of D list it there, if it is a prefill engine of theirs",
        )
    if not limits.is_push:
        # The peer may hold more than this prompt: a longer one, or the answer to an earlier turn.
        _check_blocks(params[_BLOCKS], facts, max(limits.max_model_len, 1) + _MORE_BLOCKS)
    time = params.get(_EXPIRY)
    is_time = isinstance(time, int | float) and -_MOST_SECONDS <= time <= _MOST_SECONDS
    if time is not None and _EXPIRY in facts.params and not is_time:
        _refuse(_EXPIRY, time, "a time in seconds, or null")


def check_prompts(params: object, prompt: object, embedded: object) -> None:
    """Raises:
    ParamsRefused: several prompts would be loaded from the blocks of one.
    """
    if not isinstance(params, dict) or not _flag(params.get("do_remote_prefill")):
        return
    count = sum(_prompts_in(found) for found in (prompt, embedded))
    if count > 1:
        raise ParamsRefused(
            f"{FIELD} belongs to one prompt, and the request's prompt has {count}",
            "send a request for each",
        )


def _prompts_in(prompt: object) -> int:
    if not isinstance(prompt, list):
        return int(prompt is not None)
    is_ids = bool(prompt) and all(isinstance(one, int) for one in prompt)
    return 1 if is_ids else len(prompt)


def _flag(value: object) -> bool:
    """The truth of a flag, as stock has it; but "false" says false, which stock takes for true."""
    return value.lower() not in ("", "0", "false") if isinstance(value, str) else bool(value)


def _number(value: object) -> object:
    """The number that a value says, a whole one as an integer; the value itself if it says none."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value  # type: ignore[call-overload]


def _check_text(name: str, value: object, most: int, but: tuple[str, ...] = ("Cc", "Cs")) -> None:
    """Refuses other texts, and those with characters of some of Unicode's categories."""
    if not isinstance(value, str) or not value:
        _refuse(name, value, "a text")
    elif len(value) > most:
        _refuse(name, value, f"a text of {most} characters at most (it has {len(value)})")
    elif any(unicodedata.category(c) in but for c in value):
        controls = "control characters and " if "Cc" in but else ""
        _refuse(name, value, f"a text without {controls}halves of surrogates")


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not _is_within(value, least, most):
        _refuse(name, value, f"a whole number from {least} to {most}")


def _is_within(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _check_blocks(blocks: object, facts: ReleaseFacts, most: int) -> None:
    if not isinstance(blocks, list | tuple):
        _refuse(_BLOCKS, blocks, "a list")
        return
    if not facts.has_cache_groups:
        _check_ids(_BLOCKS, blocks, most)
        return
    if len(blocks) > _MOST_GROUPS:
        raise ParamsRefused(
            f"{FIELD}.{_BLOCKS} has {len(blocks)} lists, and {_MOST_GROUPS} at most can be: this "
            "release has one for each cache group",
            AS_ANSWERED,
        )
    for number, group in enumerate(blocks):
        name = f"{_BLOCKS}[{number}]"
        if not isinstance(group, list | tuple):
            _refuse(name, group, "a list: this release has one for each cache group")
        else:
            _check_ids(name, group, most)


def completed(params: dict[str, Any], facts: ReleaseFacts) -> dict[str, Any]:
    """The parameters in the form that the release counts on, where they have one meaning.

    A number that is null is left out: the release has a default for a missing one alone. So is one
    that the release does not read and that kvpatch could not.

    Raises:
        ParamsRefused: a number that the release reads is none, or too small or large.
    """
    flags = ("do_remote_prefill", "do_remote_decode")
    found = {n: _flag(value) if n in flags else value for n, value in params.items()}
    if facts.saves_by_address and found.get("do_remote_decode"):
        return {**dict.fromkeys((*_ADDRESS, _BLOCKS)), **found}
    if facts.reads_back and _is_empty_turn(found):
        found[_BLOCKS] = []  # lists in it would have the release ask a peer without an address
    if not is_load(found, facts):
        return found
    for name, limits in _NUMBERS.items():
        value = _number(found.pop(name, None))
        if value == 0 and name in _OPTIONAL_SIZES:
            continue
        if value is not None and name in facts.params:
            _check_number(name, value, *limits)
        if _is_within(value, *limits):
            found[name] = value
    for name in ("remote_port", _EXPIRY):
        if name in found:
            found[name] = _number(found[name])
    if _BLOCKS in found:
        found[_BLOCKS] = _listed(found[_BLOCKS], facts)
    return found


def _listed(blocks: Any, facts: ReleaseFacts) -> Any:
    """Block ids as the release has them: from 0.18 on there is a list for each cache group.

    A P of another release may list those of its only group otherwise; <= 0.12 none is loaded from.
    """
    if not isinstance(blocks, list | tuple) or not blocks:
        return blocks
    if isinstance(blocks[0], list | tuple):
        groups = [_ids(group) for group in blocks]
        is_one = len(groups) == 1 and facts.names_remote_request
        return groups[0] if is_one and not facts.has_cache_groups else groups
    return [_ids(blocks)] if facts.has_cache_groups else _ids(blocks)


def _ids(ids: Any) -> Any:
    is_done = not isinstance(ids, list | tuple) or set(map(type, ids)) <= {int}  # of thousands
    return ids if is_done else [_number(one) for one in ids]


def _check_ids(name: str, ids: list[Any] | tuple[Any, ...], most: int) -> None:
    if len(ids) > most:
        raise ParamsRefused(
            f"{FIELD}.{name} has {len(ids)} block ids, and this prompt {most} at most", AS_ANSWERED
        )
    # Prompts have thousands: the loop is for those that are wrong.
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) <= _MOST_ID)):
        return
    for number, block in enumerate(ids):
        _check_number(f"{name}[{number}]", block, 0, _MOST_ID)


def _refuse(name: str, value: object, wanted: str) -> None:
    raise ParamsRefused(f"{FIELD}.{name} is {shown(value)}, not {wanted}", AS_ANSWERED)
