"""What a client sends as ``kv_transfer_params``, checked before the release sees it.

The release takes these fields for what its own P made of them: a missing one, a text for a
number, an id of 10**20 end its engine, here or two processes on. Checked are types, ranges,
lengths and what has to be there; fields that nobody knows pass, and so does everything where
nothing would be loaded. What a field says is not proven by this: who may send requests may name
any block of any peer that D can reach (docs/explanation/security.md).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpatch.core.errors import ParamsRefused
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
#: What P's workers take for messages of another kind.
_NOT_READS = ("HB:", "PUSH_REG:")


@dataclass(frozen=True)
class RequestLimits:
    """What a request's parameters are held against.

    Attributes:
        prompt_tokens: of the prompt, or the most that one may have where it is not at hand.
        max_model_len: that a prompt of this engine may have.
        is_push: whether P writes, so that no blocks of its are named (from 0.24).
        allows_peer: whether D may connect to a host and a port.
    """

    prompt_tokens: int
    max_model_len: int
    is_push: bool = False
    allows_peer: Callable[[str, int], bool] = lambda host, port: True


def is_load(params: Mapping[str, Any], facts: ReleaseFacts) -> bool:
    """Whether blocks of a peer's would be loaded, by D or, of an earlier turn, by P.

    P takes an earlier turn that is not all there for none.
    """
    if params.get("do_remote_prefill"):
        return True
    is_turn = facts.reads_back and params.get("do_remote_decode") and params.get(_BLOCKS)
    return bool(is_turn) and all(name in params for name in (*_ADDRESS, _REQUEST_ID))


def names_blocks(params: object) -> bool:
    """Whether P's blocks would be read, which it keeps until one request has read them."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill")) and _BLOCKS in params


def loads_nothing(params: Mapping[str, Any], *, reads_back: bool) -> bool:
    """Whether nothing comes of a load that the release announces, and waits for.

    Args:
        reads_back: whether this engine loads earlier turns (and has not loaded this one).
    """
    if params.get("do_remote_prefill"):
        return _is_empty(params.get(_BLOCKS))
    return not reads_back or bool(params.get("_remote_blocks_processed"))


def _is_empty(blocks: object) -> bool:
    """Whether a peer says that it holds nothing: an empty list, or one of empty ones."""
    return isinstance(blocks, list | tuple) and not any(
        not isinstance(group, list | tuple) or group for group in blocks
    )


def check(params: object, facts: ReleaseFacts, limits: RequestLimits) -> None:
    """Raises:
    ParamsRefused: the release cannot take these; the message names the field.
    """
    if params is None:
        return
    if not isinstance(params, dict):
        raise ParamsRefused(f"{FIELD} is {shown(params)}, not an object")
    for name in ("do_remote_prefill", "do_remote_decode"):
        if not _is_flag(params.get(name)):
            _refuse(name, params[name], "true or false")
    if not is_load(params, facts):
        return
    needed = list(_ADDRESS)
    if facts.names_remote_request:
        needed.append(_REQUEST_ID)
    needed.append("tp_size" if limits.is_push else _BLOCKS)
    for name in needed:
        if params.get(name) is None:
            what = "null" if name in params else "missing"
            raise ParamsRefused(f"{FIELD}.{name} is {what}: pass on all that P answered")
    _check_names(params, facts)
    _check_address(params, facts, limits)
    if not limits.is_push:
        is_turn = not params.get("do_remote_prefill")  # of which the peer may hold more
        most = limits.max_model_len if is_turn else limits.prompt_tokens
        _check_blocks(params[_BLOCKS], facts, max(most, 1) + _MORE_BLOCKS)
    _check_numbers(params)


def check_prompts(params: object, prompt: object, embedded: object) -> None:
    """Raises:
    ParamsRefused: several prompts would be loaded from the blocks of one.
    """
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return
    count = sum(_prompts_in(found) for found in (prompt, embedded))
    if count > 1:
        raise ParamsRefused(
            f"{FIELD} belongs to one prompt, and the request's prompt has {count}: send a request "
            "for each"
        )


def _prompts_in(prompt: object) -> int:
    if not isinstance(prompt, list):
        return int(prompt is not None)
    is_ids = bool(prompt) and all(isinstance(one, int) for one in prompt)
    return 1 if is_ids else len(prompt)


def _is_flag(value: object) -> bool:
    return value is None or (isinstance(value, int) and value in (0, 1))


def _check_names(params: Mapping[str, Any], facts: ReleaseFacts) -> None:
    _check_text("remote_engine_id", params["remote_engine_id"], _ENGINE_ID_LENGTH)
    if facts.names_remote_request:
        request_id = params[_REQUEST_ID]
        _check_text(_REQUEST_ID, request_id, _REQUEST_ID_LENGTH)
        if request_id.startswith(_NOT_READS):
            _refuse(_REQUEST_ID, request_id, "the name of a request")


def _check_text(name: str, value: object, most: int) -> None:
    if not isinstance(value, str) or not value:
        _refuse(name, value, "a text")
    elif len(value) > most:
        _refuse(name, value, f"a text of {most} characters at most (it has {len(value)})")
    elif any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        _refuse(name, value, "a text without control characters and halves of surrogates")


def _check_address(params: Mapping[str, Any], facts: ReleaseFacts, limits: RequestLimits) -> None:
    host, port = params["remote_host"], params["remote_port"]
    _check_text("remote_host", host, _HOST_LENGTH)
    if not _HOST.fullmatch(host):
        _refuse("remote_host", host, "a host's name or address")
    if facts.listens_in_scheduler and isinstance(port, str) and re.fullmatch("[0-9]{1,5}", port):
        port = int(port)
    _check_number("remote_port", port, 1, 65535)
    if not limits.allows_peer(host, port):
        raise ParamsRefused(
            f"{FIELD}.remote_host {shown(host)} with port {port} is not among the peers that "
            "KVPATCH_ALLOWED_PEERS lists (a name is compared with names, an address with networks)"
            ": have the operator of D list it there, if it is a prefill engine of theirs"
        )


def _check_numbers(params: Mapping[str, Any]) -> None:
    if "tp_size" in params:
        _check_number("tp_size", params["tp_size"], 1, _MOST_RANKS)
    for name, least, most in (
        ("dcp_size", 1, _MOST_RANKS),
        ("pp_size", 1, _MOST_RANKS),
        ("remote_block_size", 1, _MOST_ID),
        ("remote_num_tokens", 0, _MOST_ID),
        ("remote_registration_generation", 0, _MOST_ID),
    ):
        if params.get(name) is not None:
            _check_number(name, params[name], least, most)
        elif name in params and name in _NEVER_NULL:
            _refuse(name, None, f"a whole number from {least} to {most}")
    time = params.get("remote_blocks_expiry_time")
    if time is None:
        return
    is_number = isinstance(time, int | float) and not isinstance(time, bool)
    if not is_number or not math.isfinite(_as_float(time)) or abs(time) > _MOST_SECONDS:
        _refuse("remote_blocks_expiry_time", time, "a time in seconds, or null")


#: Where the release has a number for a missing field and none for null.
_NEVER_NULL = ("dcp_size", "pp_size", "remote_registration_generation")


def _as_float(number: float) -> float:
    """Infinity for what is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        _refuse(name, value, f"a whole number from {least} to {most}")


def _check_blocks(blocks: object, facts: ReleaseFacts, most: int) -> None:
    if not isinstance(blocks, list | tuple):
        _refuse(_BLOCKS, blocks, "a list")
        return
    if not facts.has_cache_groups:
        _check_ids(_BLOCKS, _of_one_group(blocks, facts), most)
        return
    if _is_flat(blocks):
        _check_ids(_BLOCKS, blocks, most)
        return
    if len(blocks) > _MOST_GROUPS:
        raise ParamsRefused(
            f"{FIELD}.{_BLOCKS} has {len(blocks)} lists, and {_MOST_GROUPS} at most can be: this "
            "release has one for each cache group"
        )
    for number, group in enumerate(blocks):
        name = f"{_BLOCKS}[{number}]"
        if not isinstance(group, list | tuple):
            _refuse(name, group, "a list: this release has one for each cache group")
        else:
            _check_ids(name, group, most)


def completed(params: dict[str, Any], facts: ReleaseFacts) -> dict[str, Any]:
    """The parameters as the release counts on them: a P of another one may list ids otherwise.

    From 0.18 on there is a list for each cache group, which is one here.
    """
    if facts.saves_by_address and params.get("do_remote_decode"):
        return {**dict.fromkeys((*_ADDRESS, _BLOCKS)), **params}
    if not is_load(params, facts):
        return params
    blocks: Any = params.get(_BLOCKS)
    if facts.has_cache_groups:
        return {**params, _BLOCKS: [list(blocks)]} if _is_flat(blocks) else params
    flat = _of_one_group(blocks, facts)
    return params if flat is blocks else {**params, _BLOCKS: flat}


def _of_one_group(blocks: Any, facts: ReleaseFacts) -> Any:
    """The only list of ids where there is one for each cache group, else what there is.

    Nothing is loaded <= 0.12 from a P of 0.18 or later.
    """
    is_listed = facts.names_remote_request and isinstance(blocks, list | tuple) and len(blocks) == 1
    return blocks[0] if is_listed and isinstance(blocks[0], list | tuple) else blocks


def _is_flat(blocks: Any) -> bool:
    return isinstance(blocks, list | tuple) and bool(blocks) and type(blocks[0]) is int


def _check_ids(name: str, ids: list[Any] | tuple[Any, ...], most: int) -> None:
    if len(ids) > most:
        raise ParamsRefused(
            f"{FIELD}.{name} has {len(ids)} block ids, and this prompt {most} at most"
        )
    # Prompts have thousands: the loop is for those that are wrong.
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) <= _MOST_ID)):
        return
    for number, block in enumerate(ids):
        if type(block) is not int or not 0 <= block <= _MOST_ID:
            _refuse(f"{name}[{number}]", block, f"a whole number from 0 to {_MOST_ID}")


def _refuse(name: str, value: object, wanted: str) -> None:
    raise ParamsRefused(f"{FIELD}.{name} is {shown(value)}, not {wanted}")
