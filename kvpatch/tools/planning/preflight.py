"""The mistakes that are made most when a pair is set up, found in its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvpatch.core import settings
from kvpatch.peer.description import RUNNING
from kvpatch.tools.planning.arguments import whole_number
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.pair import Pair

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_WILDCARDS = ("0.0.0.0", "::", "*")
_ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass(frozen=True)
class Finding:
    """A mistake of one side or of both: an error keeps the pair from serving."""

    level: Literal["error", "warning"]
    side: str
    what: str
    cure: str


def findings(pair: Pair) -> list[Finding]:
    """Returns the findings on a pair."""
    of_sides = [one for side in pair.sides for one in (*_connector(side), *_activation(side))]
    if any(side.arguments.about.get(RUNNING) for side in pair.sides):
        return of_sides  # a running engine publishes neither address nor port
    return [*of_sides, *_hosts(pair), *_ports(pair)]


def are_apart(pair: Pair) -> bool | None:
    """True if P and D are on two machines; None where the arguments do not say it."""
    machines = [side.arguments.about.get("machine") for side in pair.sides]
    hosts = [_host(side) for side in pair.sides]
    if None not in machines:
        return machines[0] != machines[1]
    is_open = any(_is_loopback(host) or host in _WILDCARDS for host in hosts)
    return None if is_open else hosts[0] != hosts[1]


def _host(engine: PlannedEngine) -> str:
    return engine.arguments.environment.get(HOST) or "localhost"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _hosts(pair: Pair) -> Iterator[Finding]:
    """P hands D the value of this variable, letter by letter, as its address."""
    host, apart = _host(pair.prefill), are_apart(pair)
    said = f"{HOST} is {host}" if HOST in pair.prefill.arguments.environment else f"{HOST} is unset"
    cure = f"set {HOST} on P to an address that D can reach"
    if host in _WILDCARDS:
        what = f"{said}: P tells D to connect to {host}, which is D itself"
        yield Finding("warning" if apart is False else "error", "P", what, cure)
    elif _is_loopback(host) and apart:
        yield Finding("error", "P", f"{said}, and D is on another machine", cure)
    elif _is_loopback(host) and apart is None:
        what = f"{said}: D must run on P's machine (`machine` in both sections says where they are)"
        yield Finding("warning", "P", what, cure)


def _ports(pair: Pair) -> Iterator[Finding]:
    """Two engines of one machine need ports of their own: D listens too."""
    apart = are_apart(pair)
    taken = [_ports_of(engine) for engine in pair.sides]
    both = sorted(set(taken[0]) & set(taken[1]))
    served = [engine.arguments.number("port", 8000) for engine in pair.sides]
    found = [(f"API servers have port {served[0]}", "give one of them another --port")]
    found *= served[0] == served[1]
    if both:
        cure = f"set {PORT} on D to {max(taken[0]) + 1} or more"
        found.insert(0, (f"have the side channel's port {both[0]}", cure))
    for what, cure in found if not apart else ():
        where = ", which they cannot" if apart is None else ""
        level: Literal["error", "warning"] = "warning" if apart is None else "error"
        yield Finding(level, "P and D", f"both {what}{where} on one machine", cure)


def _ports_of(engine: PlannedEngine) -> range:
    """The ports of the side channel: one for each data-parallel rank."""
    found = engine.arguments.environment.get(PORT, str(engine.facts.side_channel_port))
    first = whole_number(found, f"{engine.arguments.source}: {PORT}")
    return range(first, first + engine.arguments.number("data_parallel_size", 1))


def _connector(engine: PlannedEngine) -> Iterator[Finding]:
    right, wrong = _ROLES[:2] if engine.role == "P" else _ROLES[1::-1]
    cure = f'set "kv_role": "{right}" in its --kv-transfer-config'
    if not engine.transfer:
        what = "it has no --kv-transfer-config, and so no connector"
        cure = f'{{"kv_connector": "NixlConnector", "kv_role": "{right}"}}'
        yield Finding("error", engine.role, what, cure)
        return
    role = engine.transfer.get("kv_role")
    if role == wrong:
        yield Finding("error", engine.role, f"kv_role is {role}, which is the other side's", cure)
    elif role not in _ROLES:
        said = "not set" if role is None else f"{role!r}, which is none of vLLM's"
        yield Finding("error", engine.role, f"kv_role is {said}: vLLM does not start", cure)


def _activation(engine: PlannedEngine) -> Iterator[Finding]:
    """kvpatch is to be loaded by every process that should have it."""
    variables, role = engine.arguments.environment, engine.role
    plugins = variables.get("VLLM_PLUGINS", "kvpatch")
    if engine.has_kvpatch and "kvpatch" not in settings.listed(plugins):
        what = f"VLLM_PLUGINS={plugins!r} does not name kvpatch, so that vLLM does not load it"
        yield Finding("error", role, what, "add kvpatch to VLLM_PLUGINS, or unset it")
    switch = {settings.ENABLE: variables.get(settings.ENABLE, "")}
    for error in settings.errors(variables if engine.has_kvpatch else switch):
        what, name = error.rpartition(": ")[0], error.partition("=")[0]
        yield Finding("error", role, what, f"correct {name}, or unset it")
    asks = [name for name in variables if name.startswith("KVPATCH_")]
    if asks and not engine.has_kvpatch:
        what = f"{asks[0]} is set, and {settings.ENABLE} is not"
        yield Finding("warning", role, what, f"set {settings.ENABLE}=true")
    nodes = engine.arguments.number("nnodes", 1)
    on_ray = engine.arguments.option("distributed_executor_backend") == "ray"
    if engine.has_kvpatch and (on_ray or nodes > 1):
        what = "its workers are Ray's" if on_ray else f"it runs on {nodes} nodes"
        what = f"{what}: each process needs kvpatch installed, and {settings.ENABLE} and KVPATCH_*"
        yield Finding("warning", role, what, "read docs/how-to/several_nodes.md")
