"""The code of each release that kvpatch leans on, and which patch leans on it.

A site's parameters can stay while what happens behind it moves. This is the code that the modules
of ``kvpatch`` were written against: what they wrap, call, read and take for a fact.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvpatch.core import seams
from kvpatch.core.recognise import BASES, OVERRIDES
from kvpatch.core.releases import ReleaseFacts
from kvpatch.patches import load

from . import facts as probes
from .source import Method, classes, code_of, text
from .tables import ROOT

#: A module and a name in it, as :meth:`kvpatch.core.recognise.Source.fingerprint` takes them.
Code = tuple[str, str]
#: The patches that lean on what all of them lean on.
ALL: frozenset[str] = frozenset()

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"


def relied_on(facts: ReleaseFacts) -> dict[Code, frozenset[str]]:
    """Everything whose fingerprint must be known, with the patches that lean on it, or ALL."""
    found: dict[Code, frozenset[str]] = dict(_wrapped(facts))
    for code, slugs in _of_facts(facts):
        found[code] = found.get(code, slugs) | slugs if slugs else ALL
    # What patches wrap stands in the list of bodies too.
    shared = (*bodies(facts), *_named(facts))
    return found | {code: ALL for code in shared if code not in found}


def _wrapped(facts: ReleaseFacts) -> Iterator[tuple[Code, frozenset[str]]]:
    """The sites, which subclasses override them, and with what."""
    slugs: dict[Any, set[str]] = {}
    for patch in load():
        for site in patch.sites(facts):
            slugs.setdefault(site, set()).add(patch.slug)
            if not site.owner:  # of a function, those that call it count
                for caller in (seams.nixl_handshake(facts), seams.handshake_listener(facts)):
                    slugs.setdefault(caller, set()).add(patch.slug)
    source = code_of(facts.release)
    for site, users in slugs.items():
        by, name = frozenset(users), site.name_in_module
        yield (site.module, name), by
        if not site.owner:
            continue
        yield (site.module, f"{name}{OVERRIDES}"), by
        yield (site.module, f"{site.owner}{BASES}"), ALL
        package = facts.package_of(site.module)
        for module, owner in source.overrides(package, site.owner, site.name):
            yield (module, f"{owner}.{site.name}"), by


@dataclass(frozen=True)
class _Recording(probes.Source):
    """A source that writes down what a probe looks at."""

    looked_at: set[Code] = field(default_factory=set)

    def method(self, place: Any, name: str) -> Method | None:
        module, owner = (place, "") if isinstance(place, str) else (place.module, f"{place.owner}.")
        self.looked_at.add((module, f"{owner}{name}"))
        return super().method(place, name)

    def fields_in(self, module: str, name: str) -> frozenset[str]:
        self.looked_at.add((module, name))
        return super().fields_in(module, name)


#: What probes find in a module's text.
_IN_TEXT = {
    "connector_version": ("NIXL_CONNECTOR_VERSION",),
    "device_table": ("_NIXL_SUPPORTED_DEVICE", "_NIXL_SUPPORTED_XPUS"),
}
_ELSEWHERE = {
    "blocks_kept_seconds": ("vllm.envs", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"),
    "has_validation_errors": ("vllm.exceptions", "VLLMValidationError"),
    "lists_block_sizes": ("vllm.config.cache", "BlockSize"),
}


def _of_facts(facts: ReleaseFacts) -> Iterator[tuple[Code, frozenset[str]]]:
    """What the facts of a release were read from, with the patches that use them."""
    for fact in probes.PROBES:
        slugs = _users(fact)
        if slugs is None:
            continue
        source = _Recording(facts.release)
        probes.PROBES[fact](source)
        here = (facts.worker.module, metadata_module(facts), f"{_CONNECTORS}.nixl.utils")
        found = source.looked_at | {(m, name) for name in _IN_TEXT.get(fact, ()) for m in here}
        if fact in _ELSEWHERE:
            found.add(_ELSEWHERE[fact])
        if fact == "params":
            found |= set(_readers_of_params(facts))
        if fact == "backend_forms":
            found |= {(m, f"{name.split('.')[0]}{BASES}") for m, name in found if ".mla." in m}
        yield from ((code, slugs) for code in found)


#: The records themselves, and the sites: what they say of a method is compared with the method.
_NO_USERS = {Path("core/releases.py"), Path("core/seams.py")}


@cache
def _users(fact: str) -> frozenset[str] | None:
    """The patches that alone use a fact; ALL, or None where only sites or tools do."""
    package = ROOT / "kvpatch"
    paths = {p.relative_to(package) for p in package.rglob("*.py")} - _NO_USERS
    found = {
        path
        for path in paths
        if path.parts[0] != "tools" and re.search(rf"\.{fact}\b", (package / path).read_text())
    }
    # A property of the facts may have any user.
    if re.search(rf"\bself\.{fact}\b", (package / "core" / "releases.py").read_text()):
        return ALL
    if not found:
        return None
    return frozenset(p.stem for p in found) if all(p.parts[0] == "patches" for p in found) else ALL


def _readers_of_params(facts: ReleaseFacts) -> Iterator[Code]:
    """The methods that look something up in a client's parameters."""
    reads = re.compile(r"params(?:\.get\(|\[)")
    for module in _modules(facts):
        for owner in classes(facts.release, module):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and reads.search(ast.unparse(node)):
                    yield module, f"{owner.name}.{node.name}"


def _modules(facts: ReleaseFacts) -> list[str]:
    """The connector's modules."""
    package = facts.worker.module.rpartition(".")[0]
    names = ("pull_worker", "push_worker", "pull_scheduler", "push_scheduler", "metadata")
    found = [facts.worker.module, facts.reader.module, facts.scheduler.module]
    found += [facts.connector.module, *(f"{package}.{name}" for name in names)]
    return [module for module in dict.fromkeys(found) if text(facts.release, module)]


@cache
def _names() -> frozenset[str]:
    """Each name that the code of kvpatch, but for its tools, reads of an object or quotes."""
    found = set()
    for path in (ROOT / "kvpatch").rglob("*.py"):
        # Kernels name what Triton has, and vLLM's classes nowhere.
        if "tools" not in path.parts and not path.stem.endswith("_kernel"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            found |= {node.name for node in nodes if isinstance(node, ast.alias)}
            found |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return frozenset(found)


_INTERFACE = "vllm.v1.kv_cache_interface"
_BLOCK_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"


def _named(facts: ReleaseFacts) -> Iterator[Code]:
    """The connector's methods, and the fields of the plan's classes, that kvpatch names."""
    for module in _modules(facts):
        for owner in classes(facts.release, module):
            names = [node.name for node in owner.body if isinstance(node, ast.FunctionDef)]
            yield from ((module, f"{owner.name}.{n}") for n in names if n in _names())
    for owner in classes(facts.release, _INTERFACE):
        if owner.name in _names():
            yield _INTERFACE, owner.name


def bodies(facts: ReleaseFacts) -> list[tuple[str, str]]:
    """(module, qualified name) of every body whose fingerprint must be known."""
    sites = [site for patch in load() for site in patch.sites(facts)]
    found = [(site.module, f"{site.owner}.{site.name}") for site in sites]
    worker = facts.worker
    found += [(worker.module, f"{worker.owner}.{name}") for name in _of_worker(facts)]
    # The one call that prepares a transfer, and what is paired before it.
    found.append((facts.reader.module, f"{facts.reader.owner}._read_blocks"))
    found += _topology(facts)
    if facts.states_hash:  # made of what, and compared where
        found.append((metadata_module(facts), "compute_nixl_compatibility_hash"))
        found.append(("vllm.config.utils", "hash_factors"))
        found.append((worker.module, f"{worker.owner}._nixl_handshake"))
    if facts.listens_in_scheduler:  # from 0.11.1: by which a CPU's keys lie
        found.append(("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"))
    package, _, module = facts.scheduler.module.rpartition(".")
    if module == "base_scheduler":  # in push mode another calls the one that is replaced
        push = f"{package}.push_scheduler"
        found.append((push, "NixlPushConnectorScheduler.build_connector_meta"))
    if not facts.keeps_aborted_blocks:
        blocks = "SingleTypeKVCacheManager.free"
        found.append((_BLOCK_MANAGERS, blocks))
        found.append(("vllm.v1.core.sched.scheduler", "Scheduler._free_request"))
    if facts.allocates_before_holding:  # what a group holds, and how
        names = ("allocate_new_computed_blocks", "get_num_skipped_tokens")
        found += [(_BLOCK_MANAGERS, f"SingleTypeKVCacheManager.{name}") for name in names]
        pool = "vllm.v1.core.block_pool"
        found += [(pool, f"BlockPool.{name}") for name in ("touch", "free_blocks")]
    if facts.loses_failed_groups:
        core = ("_handle_invalid_blocks", "_update_waiting_for_remote_kv")
        found += [("vllm.v1.core.sched.scheduler", f"Scheduler.{name}") for name in core]
    return list(dict.fromkeys(found))


def metadata_module(facts: ReleaseFacts) -> str:
    """Of the connector's constants and its hash: a module of the package, or the one there is."""
    package, _, module = facts.worker.module.rpartition(".")
    return facts.worker.module if module == "nixl_connector" else f"{package}.metadata"


# How blocks of a peer that is left to the release are paired, and what becomes of smaller ones.
_PAIRING = (
    "_apply_prefix_caching",
    "_apply_dcp_prefix_caching",
    "_map_block_ids_for_block_size_ratio",
    "post_process_device_kv_on_receive",
)


def _of_worker(facts: ReleaseFacts) -> tuple[str, ...]:
    if not facts.listens_in_scheduler:
        return ("__init__",)
    both = ("__init__", "register_local_xfer_handler")
    if facts.cache_shape == "keys first":
        return both
    if facts.names_layouts:
        return (*both, "_build_fa_local", *_PAIRING)
    packed = ("_register_packed_kv_cache",) if facts.cache_shape == "packed" else ()
    return (*both, "_build_fa_local", *packed)


def _topology(facts: ReleaseFacts) -> list[tuple[str, str]]:
    """What decides whether keys and values are regions of their own."""
    made = "TpKVTopology.__post_init__"
    if not facts.listens_in_scheduler or facts.names_layouts:
        return []
    if not facts.names_remote_request:
        return [(facts.worker.module, f"{facts.worker.owner}.{made}")]
    is_later = facts.agent_metadata >= {"ssm_sizes", "attn_backend_name"}
    return [(_UTILS, "TransferTopology.__post_init__" if is_later else made)]
