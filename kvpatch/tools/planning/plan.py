"""The whole answer: the verdicts on a pair, the mistakes in its set-up, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvpatch.core import settings
from kvpatch.core.errors import BadOptions
from kvpatch.peer.engine_description import RUNNING
from kvpatch.tools.planning.arguments import EngineArguments, known, nearest, whole_number
from kvpatch.tools.planning.engine import Pair, PlannedEngine, engine_of
from kvpatch.tools.planning.verdicts import Outcome, Verdict, verdicts

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {Outcome.IDENTICAL: "green", Outcome.WRONG: "bold red", Outcome.UNKNOWN: "yellow"}


@dataclass(frozen=True)
class Finding:
    """A mistake of one side or of both: an error keeps the pair from serving."""

    level: Literal["error", "warning"]
    side: str
    what: str
    cure: str


@dataclass(frozen=True)
class PairPlan:
    """A pair, the verdicts on stock engines and with kvpatch on D, and what else is found."""

    pair: Pair
    stock: Verdict
    kvpatch: Verdict
    findings: tuple[Finding, ...]

    @property
    def configured(self) -> Verdict:
        """The verdict on the pair as its arguments have it."""
        return self.kvpatch if self.pair.decode.has_kvpatch else self.stock

    @property
    def serves(self) -> bool:
        """True if the pair can be started as it is."""
        has_errors = any(found.level == "error" for found in self.findings)
        return self.configured.outcome is Outcome.IDENTICAL and not has_errors

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences on what the arguments leave open."""
        return (*self.pair.prefill.assumed, *self.pair.decode.assumed)

    @property
    def changes(self) -> tuple[str, ...]:
        """The sentences on what to change; the pair itself comes first."""
        changes = []
        if self.configured.outcome is not Outcome.IDENTICAL:
            if self.kvpatch.outcome is Outcome.IDENTICAL:
                changes.append(f"D: set {settings.ENABLE}=true, with kvpatch installed beside vLLM")
                if self.stock.cure:
                    changes.append(f"or, without kvpatch: {self.stock.cure}")
            elif self.configured.cure:
                changes.append(self.configured.cure)
        for one in self.findings:
            if not any(one.cure in known for known in changes):
                changes.append(f"{one.side}: {one.cure}")
        return tuple(changes)

    def as_dict(self) -> dict[str, Any]:
        of_all = {"configured": self.configured, "stock": self.stock, "kvpatch": self.kvpatch}
        return {
            "serves": self.serves,
            "prefill": str(self.pair.prefill),
            "decode": str(self.pair.decode),
            "kvpatch_on_decode": self.pair.decode.has_kvpatch,
            **{name: asdict(one) | {"outcome": one.outcome.value} for name, one in of_all.items()},
            "preflight": [asdict(found) for found in self.findings],
            "changes": list(self.changes),
            "assumed": list(self.assumed),
        }

    def show(self, console: Console) -> None:
        from rich.table import Table

        table = Table(title="kvpatch plan", show_header=False)
        table.add_row("P", str(self.pair.prefill))
        table.add_row("D", str(self.pair.decode))
        table.add_row("ENABLE_KVPATCH on D", "on" if self.pair.decode.has_kvpatch else "off")
        for name, one in (("stock vLLM", self.stock), ("kvpatch on D", self.kvpatch)):
            reason = f": {one.reason}" if one.reason else ""
            way = f"\n({one.way})" if one is self.kvpatch else ""
            style = _STYLES.get(one.outcome, "red")
            table.add_row(name, f"{one.outcome.value}{reason}{way}", style=style)
        console.print(table)
        if self.findings:
            found = Table("preflight", "", "what")
            for row in self.findings:
                style = "red" if row.level == "error" else "yellow"
                found.add_row(row.level, row.side, row.what, style=style)
            console.print(found)
        verdict, style = ("serves", "green") if self.serves else ("does not serve", "red")
        console.print(f"This pair {verdict} as it is.", style=style, markup=False)
        lines = [f"change: {line}" for line in self.changes]
        for line in (*lines, *(f"taken for granted: {line}" for line in self.assumed)):
            console.print(line, markup=False, soft_wrap=True, highlight=False)


def plan_pair(
    prefill: EngineArguments, decode: EngineArguments, config: Path | None = None
) -> PairPlan:
    """Plans two engines; raises what :func:`engine_of` and :func:`verdicts` do."""
    pair = Pair(engine_of("P", prefill, config), engine_of("D", decode, config))
    stock, kvpatch = verdicts(pair)
    plan = PairPlan(pair, stock, kvpatch, tuple(findings(pair)))
    if plan.configured.outcome is Outcome.UNKNOWN:
        cure = f"{stock.cure}, or set {settings.ENABLE}=true on D"
        raise BadOptions(f"not planned for: {stock.reason}", cure)
    return plan


# --- the mistakes that are made most when a pair is set up ------------------------------------

_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_WILDCARDS = ("0.0.0.0", "::", "*")
_ROLES = ("kv_producer", "kv_consumer", "kv_both")


def findings(pair: Pair) -> list[Finding]:
    found = [one for side in pair.sides for one in (*_connector(side), *_activation(side))]
    if any(side.arguments.about.get(RUNNING) for side in pair.sides):
        return found  # a running engine publishes neither address nor port, nor its lease
    apart = _are_apart(pair)
    return [*found, *_unlike(pair), *_hosts(pair.prefill, apart), *_ports(pair, apart)]


def _are_apart(pair: Pair) -> bool | None:
    """True if P and D are on two machines; None where the arguments do not say it."""
    machines = [side.arguments.about.get("machine") for side in pair.sides]
    hosts = [_host(side) for side in pair.sides]
    if not any(one is None or "$" in str(one) for one in machines):
        return machines[0] != machines[1]
    is_open = any(_is_loopback(one) or one in _WILDCARDS or "$" in one for one in hosts)
    return None if is_open else hosts[0] != hosts[1]


def _host(engine: PlannedEngine) -> str:
    return engine.arguments.environment.get(_HOST) or "localhost"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _hosts(prefill: PlannedEngine, apart: bool | None) -> Iterator[Finding]:
    """P hands D the value of this variable, letter by letter, as its address."""
    host = _host(prefill)
    said = f"{_HOST} is {host}" if _HOST in prefill.arguments.environment else f"{_HOST} is unset"
    cure = f"set {_HOST} on P to an address that D can reach"
    if host in _WILDCARDS:
        what = f"{said}: P tells D to connect to {host}, which is D itself"
        yield Finding("warning" if apart is False else "error", "P", what, cure)
    elif "$" in host:
        yield Finding("warning", "P", f"{said}, which no shell has replaced here", cure)
    elif _is_loopback(host) and apart:
        yield Finding("error", "P", f"{said}, and D is on another machine", cure)
    elif _is_loopback(host) and apart is None:
        what = f"{said}: D must run on P's machine (`machine` in both sections says where they are)"
        yield Finding("warning", "P", what, cure)


def _ports(pair: Pair, apart: bool | None) -> Iterator[Finding]:
    """Two engines of one machine need ports of their own: D listens too."""
    taken = [_side_channel_ports(engine) for engine in pair.sides]
    both = sorted(set(taken[0]) & set(taken[1]))
    has_servers = all(side.arguments.about.get("api-server") is not False for side in pair.sides)
    served = [engine.arguments.number("port", 8000) for engine in pair.sides]
    found = []
    if both:
        cure = f"set {_PORT} on D to {max(taken[0]) + 1} or more"
        found.append((f"have the side channel's port {both[0]}", cure))
    if served[0] == served[1] and has_servers:
        cure = "give one another --port (or `api-server: false`, as workers of Dynamo's have none)"
        found.append((f"API servers have port {served[0]}", cure))
    for what, cure in found if not apart else ():
        where = ", which they cannot" if apart is None else ""
        level: Literal["error", "warning"] = "warning" if apart is None else "error"
        yield Finding(level, "P and D", f"both {what}{where} on one machine", cure)


def _side_channel_ports(engine: PlannedEngine) -> range:
    """One for each data-parallel rank."""
    found = engine.arguments.environment.get(_PORT, str(engine.facts.side_channel_port))
    first = whole_number(found, f"{engine.arguments.source}: {_PORT}")
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
    takes_float32 = engine.backend.name in ("CPU_ATTN", "TRITON_ATTN")
    if engine.caches.model_dtype == "float32" and not takes_float32:
        what = f"{engine.backend.name} takes no --dtype float32: vLLM does not start"
        yield Finding("error", engine.role, what, "use bfloat16, or another --attention-backend")
    extra = known("extra_config")
    for name in sorted(engine.extra_config.keys() - extra):
        what = f"vLLM reads no {name} in kv_connector_extra_config{nearest(name, extra)}"
        yield Finding("warning", engine.role, what, f"correct {name} or put it beside kv_connector")


def _unlike(pair: Pair) -> Iterator[Finding]:
    p, d = pair.sides
    if p.lease != d.lease:
        what = f"kv_lease_duration is {p.lease} and {d.lease}: D extends and counts P's by its own"
        yield Finding("warning", "P and D", what, "use one kv_lease_duration on both sides")
    if d.has_kvpatch and d.arguments.is_on(settings.REQUIRE_TOKENS) and not p.has_kvpatch:
        what = f"without kvpatch, while D has {settings.REQUIRE_TOKENS}: D computes every prompt"
        cure = f"set {settings.ENABLE}=true, or leave out {settings.REQUIRE_TOKENS} on D"
        yield Finding("warning", "P", what, cure)


def _activation(engine: PlannedEngine) -> Iterator[Finding]:
    """kvpatch is to be loaded by every process that should have it."""
    variables, role = engine.arguments.environment, engine.role
    nodes = engine.arguments.number("nnodes", 1)
    plugins = variables.get("VLLM_PLUGINS", "kvpatch")
    if engine.has_kvpatch and "kvpatch" not in settings.listed(plugins):
        what = f"VLLM_PLUGINS={plugins!r} does not name kvpatch, so that vLLM does not load it"
        yield Finding("error", role, what, "add kvpatch to VLLM_PLUGINS, or unset it")
    switch = {settings.ENABLE: variables.get(settings.ENABLE, "")}
    for error in settings.errors(variables if engine.has_kvpatch else switch):
        what, name = error.rpartition(": ")[0], error.partition("=")[0]
        yield Finding("error", role, what, f"correct {name}, or unset it")
    if not engine.has_kvpatch:
        asks = [name for name in variables if name.startswith("KVPATCH_")]
        if asks:
            what = f"{asks[0]} is set, and {settings.ENABLE} is not"
            yield Finding("warning", role, what, f"set {settings.ENABLE}=true")
        return
    on_ray = engine.arguments.option("distributed_executor_backend") == "ray"
    if on_ray or nodes > 1:
        what = "its workers are Ray's" if on_ray else f"it runs on {nodes} nodes"
        what = f"{what}: each process needs kvpatch installed, and {settings.ENABLE} and KVPATCH_*"
        yield Finding("warning", role, what, "read docs/how-to/several_nodes.md")
