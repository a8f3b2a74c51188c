"""What goes wrong most when a pair is set up, told from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.tools.planning.engine import PULL, PUSH, PlannedEngine
from kvpatch.tools.planning.pair import Pair

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
KEPT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
PLUGINS = "VLLM_PLUGINS"

#: Of ``vllm serve``.
_API_PORT = 8000
_WILDCARDS = ("0.0.0.0", "::", "*")

#: An error keeps the pair from serving; a warning is to be looked at.
Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        cure: what to set.
    """

    level: Level
    side: str
    what: str
    cure: str


def findings(pair: Pair) -> list[Finding]:
    """All of a pair."""
    return [found for check in _CHECKS for found in check(pair)]


def are_apart(pair: Pair) -> bool | None:
    """Whether P and D are on two machines; None where nothing says it."""
    sides = (pair.prefill, pair.decode)
    machines = [side.arguments.about.get("machine") for side in sides]
    if None not in machines:
        return machines[0] != machines[1]
    hosts = [_host(side) for side in sides]
    if not any(_is_loopback(host) or host in _WILDCARDS for host in hosts):
        return hosts[0] != hosts[1]
    return None


def _host(engine: PlannedEngine) -> str:
    return engine.arguments.environment.get(HOST) or "localhost"


def _port(engine: PlannedEngine) -> int:
    found = engine.arguments.environment.get(PORT)
    if found is None:
        return engine.facts.side_channel_port
    if not found.isascii() or not found.isdigit() or not 0 < int(found) < 1 << 16:
        raise BadOptions(
            f"{engine.arguments.source}: {PORT}={found!r} is no port",
            "set a number from 1 to 65535",
        )
    return int(found)


def _hosts(pair: Pair) -> Iterator[Finding]:
    """What P tells D of where it listens is what this variable says, word by word."""
    host, apart = _host(pair.prefill), are_apart(pair)
    said = (
        f"{HOST} is {host}" if HOST in pair.prefill.arguments.environment else f"{HOST} is not set"
    )
    cure = f"set {HOST} on P to an address that D can reach"
    if host in _WILDCARDS:
        what = f"{said}: P listens everywhere, and tells D to connect to {host}, which is D itself"
        yield Finding("warning" if apart is False else "error", "P", what, cure)
    elif _is_loopback(host) and apart is not False:
        where = "and D is on another machine" if apart else "and D reaches it there alone"
        known = "" if apart else " (`machine` in both sections says where they are)"
        level: Level = "error" if apart else "warning"
        yield Finding(level, "P", f"{said}: P listens on {host}, {where}{known}", cure)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _ports(pair: Pair) -> Iterator[Finding]:
    """Two engines of one machine need ports of their own, D too: both listen."""
    apart = are_apart(pair)
    if apart:
        return
    level: Level = "warning" if apart is None else "error"
    where = "which they cannot on one machine" if apart is None else "on one machine"
    taken = [_ports_of(engine) for engine in (pair.prefill, pair.decode)]
    both = sorted(set(taken[0]) & set(taken[1]))
    if both:
        yield Finding(
            level, "P and D", f"both have the side channel's port {both[0]}, {where}",
            f"set {PORT} on D to {max(taken[0]) + 1} or more",
        )  # fmt: skip
    if pair.prefill.arguments.running and pair.decode.arguments.running:
        return  # each has got its own
    served = [engine.arguments.number("port", _API_PORT) for engine in (pair.prefill, pair.decode)]
    if served[0] == served[1]:
        yield Finding(
            level, "P and D", f"both API servers have port {served[0]}, {where}",
            "give one of them another --port",
        )  # fmt: skip


def _ports_of(engine: PlannedEngine) -> range:
    """One for each data-parallel rank; <= 0.11.0 one for each worker."""
    groups = engine.arguments.number("data_parallel_size", 1)
    each = 1 if engine.facts.listens_in_scheduler else engine.tp_size
    return range(_port(engine), _port(engine) + groups * each)


def _running(pair: Pair) -> Iterator[Finding]:
    """What engines that run already deny of their files, or lack."""
    for engine in (pair.prefill, pair.decode):
        running = engine.arguments.running
        if running is None:
            continue
        for one in running.contradictions:
            yield Finding(
                "warning", engine.role,
                f"{one.said_by} says {one.name}: {one.written}, and the running engine answers "
                f"{one.answered} ({one.where}), which is what this plan is of",
                f"write {one.name}: {one.answered}, or start the engine with what is written",
            )  # fmt: skip
        if running.misses_kvpatch:
            yield Finding(
                "error", engine.role,
                f"{settings.ENABLE} is said to be set, and {running.url} shows no metrics of "
                "kvpatch's: the running engine has not loaded it",
                f"install kvpatch beside its vLLM, set {settings.ENABLE}=true where it is started, "
                "and restart it",
            )  # fmt: skip
        if running.misses_connector and engine.transfer:
            yield Finding(
                "error", engine.role,
                f"{running.url} shows no metrics of NixlConnector's: the running engine has none",
                "start it with the --kv-transfer-config that is written",
            )  # fmt: skip


def _leases(pair: Pair) -> Iterator[Finding]:
    """How long P keeps a prompt, against how long D may let one wait."""
    p, d = pair.prefill, pair.decode
    queue = d.arguments.about.get("queue-seconds")
    if p.facts.grants_leases:
        yield from _leases_that_are_renewed(pair)
        return
    kept = [
        int(side.arguments.environment.get(KEPT) or side.facts.blocks_kept_seconds)
        for side in (p, d)
    ]
    if kept[0] != kept[1]:
        yield Finding(
            "warning", "P and D",
            f"{KEPT} is {kept[0]} on P and {kept[1]} on D: kvpatch on D gives a read up by its own",
            f"set {KEPT} to one number on both",
        )  # fmt: skip
    if queue is not None and float(queue) >= kept[0]:
        yield Finding(
            "error", "P",
            f"P keeps a prompt for {kept[0]} s, and D's queue is {float(queue):g} s long: stock D "
            "then reads another prompt's blocks, with HTTP 200",
            f"set {KEPT} to more than {float(queue):g} on both, or ENABLE_KVPATCH on both",
        )  # fmt: skip


def _leases_that_are_renewed(pair: Pair) -> Iterator[Finding]:
    sides = (pair.prefill, pair.decode)
    seconds = [_lease_seconds(side) for side in sides]
    if seconds[0] != seconds[1]:
        yield Finding(
            "warning", "P and D",
            f"kv_lease_duration is {seconds[0]} on P and {seconds[1]} on D: D renews by its own",
            "give both one kv_lease_duration in kv_connector_extra_config",
        )  # fmt: skip
    if KEPT in pair.prefill.arguments.environment:
        yield Finding(
            "warning", "P", f"{KEPT} is read by vLLM <= 0.21 alone; this one grants leases",
            "set kv_lease_duration in kv_connector_extra_config",
        )  # fmt: skip


def _lease_seconds(engine: PlannedEngine) -> int:
    return int(engine.extra_config.get("kv_lease_duration") or engine.facts.blocks_kept_seconds)


def _roles(pair: Pair) -> Iterator[Finding]:
    for engine in (pair.prefill, pair.decode):
        right, wrong = {
            "P": ("kv_producer", "kv_consumer"), "D": ("kv_consumer", "kv_producer"),
        }[engine.role]  # fmt: skip
        if not engine.has_roles:
            right = "kv_both"
        if not engine.transfer:
            yield Finding(
                "error", engine.role, "it has no --kv-transfer-config, and so no connector",
                f'{{"kv_connector": "NixlConnector", "kv_role": "{right}"}}',
            )  # fmt: skip
            continue
        connector, role = engine.transfer.get("kv_connector"), engine.transfer.get("kv_role")
        known = ("NixlConnector", PULL, PUSH) if engine.has_roles else ("NixlConnector",)
        if connector not in known:
            yield Finding("error", engine.role, f"kv_connector is {connector}", "use NixlConnector")
        cure = f'set "kv_role": "{right}" in its --kv-transfer-config'
        if role not in ("kv_producer", "kv_consumer", "kv_both"):
            said = "not set" if role is None else f"{role!r}, which is none of vLLM's"
            yield Finding("error", engine.role, f"kv_role is {said}: vLLM does not start", cure)
        elif role == wrong:
            yield Finding(
                "error", engine.role, f"kv_role is {role}, which is the other side's", cure
            )


def _devices(pair: Pair) -> Iterator[Finding]:
    for engine in (pair.prefill, pair.decode):
        device = engine.device_type
        known = engine.known_buffer_devices
        if engine.transfer and known and engine.buffer_device not in known:
            asked = engine.transfer.get("kv_buffer_device")
            said = f"kv_buffer_device is {asked}" if asked else "kv_buffer_device is not set"
            yield Finding(
                "error", engine.role,
                f"{said}, and vLLM {engine.facts.release} takes {engine.buffer_device} for it, "
                f"which a {device} engine refuses at start",
                f'set "kv_buffer_device": "{known[0]}" in its --kv-transfer-config',
            )  # fmt: skip


def _activation(pair: Pair) -> Iterator[Finding]:
    """Whether the processes that should have kvpatch come to load it."""
    for engine in (pair.prefill, pair.decode):
        variables = engine.arguments.environment
        plugins = variables.get(PLUGINS)
        named = [name.strip() for name in (plugins or "").split(",")]
        if engine.has_kvpatch and plugins is not None and "kvpatch" not in named:
            yield Finding(
                "error", engine.role,
                f"{PLUGINS}={plugins!r} does not name kvpatch, so that vLLM does not load it",
                f"add kvpatch to {PLUGINS}, or unset it",
            )  # fmt: skip
        asks = [name for name in variables if name.startswith("KVPATCH_")]
        if asks and not engine.has_kvpatch:
            yield Finding(
                "warning", engine.role, f"{asks[0]} is set, and {settings.ENABLE} is not",
                f"set {settings.ENABLE}=true",
            )  # fmt: skip


def _ray(pair: Pair) -> Iterator[Finding]:
    """Ray's workers have what vLLM copies; other nodes have what their shells have."""
    for engine in (pair.prefill, pair.decode):
        on_ray = engine.arguments.option("distributed_executor_backend") == "ray"
        nodes = int(engine.arguments.option("nnodes", 1) or 1)
        stated = engine.arguments.about.get("ray")
        if not engine.has_kvpatch or not (on_ray or nodes > 1):
            continue
        if stated == "copies":
            continue
        what = "its workers are Ray's" if on_ray else f"it runs on {nodes} nodes"
        yield Finding(
            "warning", engine.role,
            f"{what}: each process needs kvpatch installed, and {settings.ENABLE} and KVPATCH_*",
            "docs/how-to/several_nodes.md; then say `ray: copies`",
        )  # fmt: skip


_CHECKS: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _roles,
    _devices,
    _hosts,
    _ports,
    _leases,
    _activation,
    _ray,
    _running,
)
