"""What is asked of a client's parameters, and where D may connect; no vLLM in it."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch.core import seams
from kvpatch.core.errors import ParamsRefused, SettingsError
from kvpatch.core.releases import FACTS, ReleaseFacts
from kvpatch.core.text import shown
from kvpatch.guard.allowed_peers import parse
from kvpatch.guard.transfer_params import (
    RequestLimits,
    check_prompts,
    checked,
    completed,
    loads_nothing,
)
from kvpatch.load.common_prompt import PromptLoads
from kvpatch.patches import FRONT_ENDS, load, same_prompt
from kvpatch.patches.transfer_params import (
    _add_request,
    _create_completion,
    _get_num_new_matched_tokens,
    _server_add_request,
)
from kvpatch.worker.state import engine_state, held_by, scheduler_state
from tests.bad_params import bad_params

_FORM = FACTS["0.33.0"]
_LIMITS = RequestLimits(max_model_len=1024)
#: As P of 0.33.0 answers.
_OWN: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[38, 88, 51]],
    "remote_engine_id": "6f1c8f3e-0d4e-4c57-a2a2-6f0f6b1f4f7e_dp0",
    "remote_request_id": "cmpl-___prefill_addr_10.0.0.1:8100-0-1a2b3c4d",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 150,
    "remote_blocks_expiry_time": None,
    "remote_registration_generation": 0,
    "remote_prefill_cached_tokens": 17,
    "transfer_mode": "pull",
}
_PROXYS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
_TO_P = {"do_remote_decode": True, "do_remote_prefill": False, **_PROXYS}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        _OWN,
        _TO_P,
        {"do_remote_decode": True},
        {**_TO_P, "remote_host": 7, "remote_num_tokens": "x"},  # nothing is loaded
        {"do_remote_prefill": False, "remote_block_ids": "x"},
        {**_OWN, "remote_block_ids": []},
        {**_OWN, "remote_block_ids": [[], []]},
        {**_OWN, "remote_block_ids": ([1, 2], (3,))},
        {**_OWN, "remote_request_id": "a client's\tX-Request-Id\n"},
        {**_OWN, "remote_host": "prefill-0.pool.svc"},
        {**_OWN, "remote_host": "fe80::1%eth0"},
        {**_OWN, "remote_host": "[::1]"},
        {**_OWN, "somebodys": {"own": [1, "x"]}},
        {**_OWN, "remote_blocks_expiry_time": 1234.5, "do_remote_decode": True},
        {**_OWN, "do_remote_prefill": False, "do_remote_decode": True},
        {"do_remote_decode": True, "remote_block_ids": 7},  # no turn: the rest is not there
    ],
)
def test_right_parameters_pass_untouched(params: Any) -> None:
    before = json.dumps(params)

    assert json.loads(json.dumps(checked(params, _FORM, _LIMITS))) == json.loads(before)

    assert json.dumps(params) == before


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ({"do_remote_prefill": "true", "do_remote_decode": "False"}, {}),
        ({"do_remote_prefill": 1, "do_remote_decode": None}, {}),
        ({"remote_port": "5600", "tp_size": "1", "remote_num_tokens": "150"}, {}),
        ({"remote_port": 5600.0, "tp_size": 1.0, "remote_num_tokens": 150.0}, {}),
        ({"tp_size": True, "dcp_size": "1.0"}, {}),
        ({"remote_block_ids": [[38.0, 88, 51.0]]}, {}),
        ({"remote_block_ids": [["38", "88", "51"]]}, {}),
        ({"remote_block_ids": [38.0, "88", 51]}, {}),
        ({"remote_blocks_expiry_time": "1234.5"}, {"remote_blocks_expiry_time": 1234.5}),
        ({"remote_block_size": "x", "transfer_mode": 7}, {"remote_block_size": "x"}),
    ],
)
def test_what_has_one_meaning_is_taken_for_that(sent: Any, taken: Any) -> None:
    params = {**_OWN, **sent}
    before = json.dumps(params)

    found = checked(params, _FORM, _LIMITS)

    assert found == {**_OWN, **{n: params[n] for n in ("transfer_mode",)}, **taken}
    numbers = ("tp_size", "dcp_size", "remote_port", "remote_num_tokens")
    assert {type(found[name]) for name in numbers} == {int}
    assert {type(one) for group in found["remote_block_ids"] for one in group} == {int}
    assert {type(found[n]) for n in ("do_remote_prefill", "do_remote_decode")} == {bool}
    assert json.dumps(params) == before


def test_a_null_that_the_release_would_end_by_is_left_out() -> None:
    """It has a default for a missing one, and none for null, nor for the 0 that some make of it."""
    names = ("tp_size", "dcp_size", "pp_size", "remote_registration_generation")
    for name, none in (*((name, None) for name in names), ("dcp_size", 0), ("pp_size", "0")):
        found = checked({**_OWN, name: none}, _FORM, _LIMITS)
        assert found == {n: value for n, value in _OWN.items() if n != name}


@pytest.mark.parametrize("facts", FACTS.values(), ids=lambda facts: facts.release)
def test_what_a_release_does_not_read_is_not_asked(facts: ReleaseFacts) -> None:
    names = ("dcp_size", "pp_size", "remote_num_tokens", "remote_registration_generation")
    names += ("remote_blocks_expiry_time", "remote_request_id")
    own = {**_OWN, "remote_block_ids": [38, 88, 51]}
    for name in names:
        if name in facts.params:
            continue
        for odd in (None, "x", [1], -1, 10**20):
            found = checked({**own, name: odd}, facts, _LIMITS)
            assert found is not None
            # What kvpatch reads itself is a number, or not there.
            assert name != "remote_num_tokens" or name not in found


def test_false_as_a_text_loads_nothing() -> None:
    """Stock takes it for true: the only value that is taken for another than stock's."""
    for no in ("false", "FALSE", "0", "", 0, 0.0, False, None, []):
        found = checked({**_OWN, "do_remote_prefill": no, "remote_port": "x"}, _FORM, _LIMITS)
        assert found is not None and not found["do_remote_prefill"]
    for yes in ("true", "True", "1", "yes", 1, 2.0, [0]):
        found = checked({**_OWN, "do_remote_prefill": yes}, _FORM, _LIMITS)
        assert found is not None and found["do_remote_prefill"] is True


def test_each_wrong_field_is_named() -> None:
    found = bad_params(_OWN)

    assert len(found) >= 60
    for field, params in found:
        with pytest.raises(ParamsRefused) as refused:
            checked(params, _FORM, _LIMITS)
        message = str(refused.value)
        assert message.startswith("kv_transfer_params")
        assert field in message, (field, message)
        assert len(message) < 1000
        assert message.isprintable()


def test_to_0_12_a_list_of_ids_and_no_name_of_the_request_do() -> None:
    form = FACTS["0.11.0"]
    params = {**_OWN, "remote_block_ids": [1, 2, 3]}
    del params["remote_request_id"]

    checked(params, form, _LIMITS)
    with pytest.raises(ParamsRefused, match="remote_block_ids"):
        checked({**params, "remote_block_ids": [[1, 2, 3]]}, form, _LIMITS)


def test_in_push_mode_no_blocks_are_named() -> None:
    params = {**_OWN}
    del params["remote_block_ids"]
    pushes = RequestLimits(max_model_len=1024, is_push=True)

    checked(params, _FORM, pushes)
    del params["tp_size"]
    with pytest.raises(ParamsRefused, match="tp_size is missing"):
        checked(params, _FORM, pushes)


@pytest.mark.parametrize("name", [None, ""])
def test_in_push_mode_no_request_of_ps_is_named(name: str | None) -> None:
    """A proxy may ask D before P has answered. The release takes a null, and ends without any."""
    params = {**_OWN, "remote_request_id": name}
    pushes = RequestLimits(max_model_len=1024, is_push=True)

    checked(params, _FORM, pushes)
    with pytest.raises(ParamsRefused, match="remote_request_id is"):
        checked(params, _FORM, _LIMITS)
    for wrong in ({}, 0, ["a name"]):
        with pytest.raises(ParamsRefused, match="remote_request_id is"):
            checked({**params, "remote_request_id": wrong}, _FORM, pushes)
    del params["remote_request_id"]
    with pytest.raises(ParamsRefused, match="remote_request_id is missing"):
        checked(params, _FORM, pushes)


def test_as_many_blocks_as_a_prompt_can_have() -> None:
    """P may hold more than D is asked: D loads what both prompts have in common, and tells P."""
    checked({**_OWN, "remote_block_ids": [list(range(1024 + 64))]}, _FORM, _LIMITS)
    with pytest.raises(ParamsRefused, match="has 1089 block ids"):
        checked({**_OWN, "remote_block_ids": [list(range(1024 + 65))]}, _FORM, _LIMITS)


_FLAT = {**_OWN, "remote_block_ids": [1, 2, 3]}
_BARE = {"do_remote_decode": True}
_TYPED_TO_P = {**_TO_P, "remote_request_id": None, "remote_block_ids": [], "remote_num_tokens": 0}
_OF_ZEROS = {**_TYPED_TO_P, "remote_port": 0}


@pytest.mark.parametrize(
    ("params", "release", "expected"),
    [
        (_FLAT, "0.33.0", {**_OWN, "remote_block_ids": [[1, 2, 3]]}),  # of the only group
        (_OWN, "0.33.0", _OWN),
        (_TO_P, "0.33.0", _TO_P),
        (_FLAT, "0.17.1", _FLAT),
        (_BARE, "0.10.2", {**_PROXYS, **_BARE}),  # P saves a prompt whose reader nobody knows
        (_TO_P, "0.10.2", _TO_P),
        (_BARE, "0.13.0", _BARE),
        # Stock counts no tokens of an earlier turn.
        ({**_TYPED_TO_P, "remote_block_ids": [[]]}, "0.33.0", _TYPED_TO_P),
        ({**_TYPED_TO_P, "remote_block_ids": [[], []], "remote_port": 0}, "0.21.0", _OF_ZEROS),
    ],
)
def test_what_is_missing_is_completed(params: Any, release: str, expected: Any) -> None:
    assert completed(params, FACTS[release]) == expected
    assert checked(params, FACTS[release], _LIMITS) == expected


def test_a_release_without_groups_takes_the_only_list_of_one_with_them() -> None:
    old = FACTS["0.17.1"]
    assert checked(_OWN, old, _LIMITS) == {**_OWN, "remote_block_ids": [38, 88, 51]}
    for blocks in ([[1], [2]], [[1, [2]]], [["x"]]):
        with pytest.raises(ParamsRefused, match="remote_block_ids"):
            checked({**_OWN, "remote_block_ids": blocks}, old, _LIMITS)


def test_what_loads_nothing() -> None:
    assert loads_nothing({**_OWN, "remote_block_ids": [[], []]}, reads_back=False)
    assert not loads_nothing(_OWN, reads_back=False)
    turn = {**_OWN, "do_remote_prefill": False, "do_remote_decode": True}
    assert loads_nothing(turn, reads_back=False)
    assert not loads_nothing(turn, reads_back=True)
    assert loads_nothing({**turn, "_remote_blocks_processed": True}, reads_back=True)


class _Nixl:
    """Stands in for the release's connector."""

    def __init__(self) -> None:
        self.connector_scheduler = SimpleNamespace()
        scheduler_state(self.connector_scheduler).facts = _FORM


@pytest.fixture
def nixls_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it in the release's place."""
    monkeypatch.setitem(
        sys.modules, _FORM.connector.module, SimpleNamespace(**{_FORM.connector.owner: _Nixl})
    )


#: As Mooncake's proxy sends them to D.
_MOONCAKES = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "xfer-1",
    "remote_engine_id": "9f0c",
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
}


@pytest.mark.usefixtures("nixls_connector")
@pytest.mark.parametrize("is_first", [False, True])
def test_parameters_of_a_connector_that_stands_before_nixls_stay(
    is_first: bool,
) -> None:
    """MultiConnector asks in order; where NIXL's is first, stock too would load by it."""
    nixl, mooncake = _Nixl(), SimpleNamespace()
    connectors = [nixl, mooncake] if is_first else [mooncake, nixl]
    core = SimpleNamespace(connector=SimpleNamespace(_connectors=connectors), max_model_len=1024)
    engine_state(core).facts = _FORM
    request = SimpleNamespace(request_id="r", kv_transfer_params=dict(_MOONCAKES))

    _add_request(lambda request: None, core, request)

    assert request.kv_transfer_params == (None if is_first else _MOONCAKES)


@pytest.mark.usefixtures("nixls_connector")
@pytest.mark.parametrize("others", [0, 1])
def test_nixls_connector_is_told_of_others(others: int) -> None:
    """Mooncake's scheduler half has records of the same name, and no plan of caches."""
    nixl, of_mooncake = _Nixl(), SimpleNamespace(_reqs_need_recv={})
    mooncake = SimpleNamespace(connector_scheduler=of_mooncake)
    connectors = [nixl, *[mooncake] * others]
    core = SimpleNamespace(connector=SimpleNamespace(_connectors=connectors))
    engine_state(core).facts = _FORM

    same_prompt._add_request(lambda _: None, core, SimpleNamespace(kv_transfer_params=_OWN))

    loads = held_by(nixl.connector_scheduler, PromptLoads)
    assert (loads is not None and loads.has_company) is bool(others)
    assert held_by(of_mooncake, PromptLoads) is None


@pytest.mark.usefixtures("nixls_connector")
@pytest.mark.parametrize("is_told", [False, True])
def test_a_request_by_which_the_server_tells_p_is_not_refused_again(
    caplog: pytest.LogCaptureFixture, is_told: bool
) -> None:
    """From 0.21 on the server sends one with the same parameters behind its answer of 400."""
    core = SimpleNamespace(connector=_Nixl(), max_model_len=1024)
    engine_state(core).facts = _FORM
    request = SimpleNamespace(request_id="r", kv_transfer_params={**_OWN, "tp_size": 0})
    request.abort_immediately = is_told

    _add_request(lambda request: None, core, request)

    assert request.kv_transfer_params is None
    assert ("is taken without its parameters" in caplog.text) is not is_told


@pytest.mark.usefixtures("nixls_connector")
@pytest.mark.parametrize("is_told", [False, True])
def test_p_is_told_of_a_refused_prompt_that_is_longer_than_any_of_ours(
    is_told: bool,
) -> None:
    core = SimpleNamespace(connector=_Nixl(), max_model_len=256)
    engine_state(core).facts = _FORM
    params = {**_OWN, "remote_block_ids": [list(range(1, 376))]}
    request = SimpleNamespace(request_id="r", kv_transfer_params=params, abort_immediately=is_told)

    _add_request(lambda request: None, core, request)

    assert (request.kv_transfer_params == params) is is_told


def test_nixls_connector_loads_nothing_by_the_parameters_of_another() -> None:
    request = SimpleNamespace(kv_transfer_params=_MOONCAKES)

    assert _get_num_new_matched_tokens(lambda *_: (99, True), _Nixl(), request, 0) == (0, False)


@pytest.mark.parametrize(
    ("prompt", "embedded"),
    [(["a", "b"], None), ([[1, 2], [3]], None), ("a", b"x"), (None, [b"x", b"y"])],
)
def test_several_prompts_have_no_parameters_of_one(prompt: Any, embedded: Any) -> None:
    with pytest.raises(ParamsRefused, match="send a request for each"):
        check_prompts(_OWN, prompt, embedded)
    check_prompts(_TO_P, prompt, embedded)
    check_prompts(None, prompt, embedded)


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]], [], None])
def test_one_prompt_has(prompt: Any) -> None:
    check_prompts(_OWN, prompt, None)


_LISTED = (
    "10.0.0.0/8:5600-5700",
    "fd00::/8",
    "prefill-0:5600",
    "*.P.svc",
    "[::1]:7",
    "::ffff:192.168.0.0/112",
)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("10.1.2.3", 5600),
        ("::ffff:10.1.2.3", 5700),
        ("[::ffff:a01:203]", 5600),
        ("Prefill-0.", 5600),
        ("a.p.svc", 1),
        ("0:0:0:0:0:0:0:1", 7),
        ("192.168.3.4", 1),
        ("[fd12::1]", 1),
    ],
)
def test_a_peer_that_is_listed(host: str, port: int) -> None:
    assert parse(_LISTED).allows(host, port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("10.1.2.3", 5599),
        ("prefill-0", 5601),
        ("::1", 8),
        *((host, 1) for host in ("evilp.svc", "p.svc", "fe80::1%eth0")),
        # 10.0.0.1, as the resolver takes it too
        *((host, 5600) for host in ("10.1", "0x0a.1", "167772161", "012.0.0.1")),
        *((host, 5600) for host in ("0.0.0.0", "10.0.0.1.example.org", "64:ff9b::a00:1")),
    ],
)
def test_a_peer_that_is_not(host: str, port: int) -> None:
    allowed = parse(_LISTED)

    assert not allowed.allows(host, port)
    limits = RequestLimits(max_model_len=1024, allows_peer=allowed.allows)
    with pytest.raises(ParamsRefused, match="remote_host .* KVPATCH_ALLOWED_PEERS"):
        checked({**_OWN, "remote_host": host, "remote_port": port}, _FORM, limits)


def test_any_peer_without_a_list() -> None:
    assert parse(()).allows("anybody", 1)
    assert parse(("*:5600",)).allows("anybody", 5600)
    assert not parse(("*:5600",)).allows("anybody", 5601)


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "x:0", "x:70000", "x:9-8", "[::1", "http://x"])
def test_an_entry_that_cannot_be_read(entry: str) -> None:
    with pytest.raises(SettingsError, match="KVPATCH_ALLOWED_PEERS"):
        parse((entry,))


def test_what_is_shown_is_one_short_line() -> None:
    for odd in (
        "x" * 10**7,
        "a\nERROR forged",
        ["y" * 10**6] * 10**6,
        10**5000,
        {"a": [[[["b"]]]]},
    ):
        text = shown(odd)
        assert len(text) < 500
        assert text.isprintable()
    assert shown("engine-1") == "'engine-1'"


def _server(connector: str | None, module: str | None = None) -> Any:
    """Fake: of the API server's engine client there is no more than its settings."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector=connector, kv_connector_module_path=module
            ),
            model_config=SimpleNamespace(max_model_len=1024),
        )
    )


@pytest.mark.parametrize("facts", FACTS.values(), ids=lambda facts: facts.release)
def test_the_server_refuses_before_anything_is_booked(facts: ReleaseFacts) -> None:
    taken: list[Any] = []
    ids = [38, 88, 51]
    own = {**_OWN, "remote_block_ids": [ids] if facts.has_cache_groups else ids}

    def ask(connector: str, params: Any) -> None:
        sampling = SimpleNamespace(extra_args={"kv_transfer_params": params})
        given = ("name", "prompt", sampling, 1.0)
        server = _server(connector)
        _server_add_request(lambda *given: taken.append(given), server, *given, facts=facts)

    ask("NixlConnector", own)
    assert len(taken) == 1
    assert taken[0][1] == "prompt"
    with pytest.raises(Exception, match="remote_block_ids is 7"):
        ask("NixlConnector", {**own, "remote_block_ids": 7})
    assert len(taken) == 1
    ask("MooncakeConnector", {"do_remote_prefill": True, "transfer_id": "x"})
    assert len(taken) == 2


def test_every_module_of_the_front_end_is_watched() -> None:
    """One that is not would be left as it is, without a word."""
    found = {
        (patch.slug, site.module in seams.front_end_modules(facts))
        for patch in load()
        for facts in FACTS.values()
        for site in patch.sites(facts)
        if site.is_front_end
    }

    assert found == {(slug, True) for slug in FRONT_ENDS}


def test_the_server_answers_several_prompts_with_an_error() -> None:
    """From 0.21 on inside of what has P told of an error, whose return it does not see."""
    names = [seams.create_completion(FACTS[one]).name for one in ("0.20.2", "0.21.0")]
    assert names == ["create_completion", "_create_completion"]

    async def create(request: Any, raw_request: Any = None) -> str:
        return "answered"

    server = SimpleNamespace(
        create_error_response=lambda message: f"error: {message}",
        engine_client=_server("NixlConnector"),
    )

    def ask(prompt: Any, embedded: Any = None, release: str = "0.33.0") -> Any:
        request = SimpleNamespace(prompt=prompt, prompt_embeds=embedded, kv_transfer_params=_OWN)
        facts = FACTS[release]
        return asyncio.run(_create_completion(create, server, request, facts=facts))

    several = "error: kv_transfer_params belongs to one prompt"
    assert ask("one") == "answered"
    assert ask(["one", "two"]).startswith(several)
    assert ask("", b"x", "0.15.1") == "answered"  # <= 0.15 it is no prompt there
    for embedded, release in ((b"x", "0.16.0"), ([b"x", b"y"], "0.15.1")):
        assert ask("", embedded, release).startswith(several)
    for connector, module, is_asked in (
        ("MultiConnector", None, True),
        ("Own", "somebodys.connector", True),
        ("LMCacheConnectorV1", None, False),  # of which stock warns, and serves them
        (None, None, False),
    ):
        server.engine_client = _server(connector, module)
        assert ask(["one", "two"]).startswith(several if is_asked else "answered")
    server.engine_client.vllm_config.kv_transfer_config = None
    assert ask(["one", "two"]) == "answered"
