"""Hand-made ``kv_transfer_params`` that no P sends, each with the field that is wrong in it."""

from __future__ import annotations

from typing import Any

_LEFT_OUT = object()

#: To each field the values that it must not have.
_WRONG: dict[str, tuple[Any, ...]] = {
    "remote_block_ids": (
        _LEFT_OUT,
        None,
        7,
        "12345",
        {"0": [1]},
        True,
        [["1", "x"]],
        [["-1"]],
        [[1.5]],
        [[1e308]],
        [[-1]],
        [[2**31]],
        [[2**63]],
        [[10**20]],
        [[None]],
        [[[1]]],
        [None],
        ["x"],
        [[1], 7],
        [{}],
        [list(range(20_000))],  # more than any prompt here can have
        [[] for _ in range(1000)] + [[1]],
    ),
    "remote_engine_id": (
        _LEFT_OUT,
        None,
        7,
        ["a"],
        {"a": 1},
        "",
        "x" * 5000,
        "a\nforged",
        "\ud800",
    ),
    "remote_request_id": (
        _LEFT_OUT,
        None,
        7,
        ["a"],
        "",
        "x" * 20000,
        "\ud800",
        "PUSH_REG:x",
        "HB:x",
    ),
    "remote_host": (_LEFT_OUT, None, 7, ["h"], "", "a b", "a/b", "a;b", "x" * 300, "\u00e9\n"),
    "remote_port": (_LEFT_OUT, None, "x", -1, 0, 65536, 10**20, 1.5, "1.5", [1], "99999"),
    "tp_size": (0, -1, 10**9, 2**64, "two", 1.5, "1.5", [1], {}),
    # Of releases that read them.
    "remote_num_tokens": ("x", -1, 10**20, 1.5, [1]),
    "pp_size": ("x", -1, 10**9),
    "dcp_size": ([1], -1),
    "remote_blocks_expiry_time": ("x", float("nan"), float("inf"), 10**400, [1]),
    "remote_registration_generation": ("x", -1, 2**63),
}


def bad_params(own: dict[str, Any]) -> list[tuple[str, Any]]:
    """(field, parameters) of each, made of P's own answer.

    A field that this release's P does not say is neither left out nor spoilt.
    """
    found: list[tuple[str, Any]] = [("kv_transfer_params", odd) for odd in (7, "x", [], [1], True)]
    for field in [name for name in _WRONG if name in own]:
        for value in _WRONG[field]:
            params = {**own, field: value}
            if value is _LEFT_OUT:
                del params[field]
            found.append((field, params))
    # What a proxy asks of P, beside P's own answer to it.
    both = {**own, "do_remote_decode": True}
    if "remote_num_tokens" in own:
        found += [("remote_num_tokens", {**both, "remote_num_tokens": "x"})]
    found += [("remote_block_ids", {**both, "remote_block_ids": 7})]
    return found
