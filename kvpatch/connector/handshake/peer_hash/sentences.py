"""What is said of a peer whose compatibility hash is another: how it differs, and what to set."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvpatch.connector.handshake.peer_hash import factors
from kvpatch.connector.handshake.peer_hash.explanation import Difference, Explanation
from kvpatch.core import settings
from kvpatch.core.errors import PeerRefused

#: The release's name of each factor that can be accepted, and ours.
ACCEPTABLE = {factors.VERSION: "vllm_version", factors.BACKEND: "attn_backend"}

_ON_BOTH = {
    factors.VERSION: "one release of vLLM",
    factors.BACKEND: "one attention backend (--attention-backend)",
    factors.CACHE_DTYPE: "one --kv-cache-dtype",
    factors.DTYPE: "one --dtype",
    factors.CROSS_LAYERS: "one enable_cross_layers_blocks (kv_connector_extra_config)",
    factors.HYBRID: "--disable-hybrid-kv-cache-manager, or do not,",
    factors.SPECULATION: "one --speculative-config",
    factors.MODE: "one connector, NixlConnector or NixlPushConnector,",
    factors.CONNECTOR_VERSION: "one build of vLLM",
}


def clause(explanation: Explanation) -> str:
    """How a peer and this engine differ, in a sentence without its full stop."""
    theirs = _all_of([(one.factor, one.theirs) for one in explanation.differences])
    ours = _all_of([(one.factor, one.ours) for one in explanation.differences])
    return f"P {theirs}; this engine {ours}".replace("this engine runs vLLM ", "this engine runs ")


def refusal(explanation: Explanation, accepted: Collection[str]) -> PeerRefused:
    """Of a peer that differs in something that is not accepted."""
    cures = [_cure(one) for one in explanation.differences]
    missing = [ACCEPTABLE.get(one.factor) for one in explanation.differences]
    wanted = ",".join((*accepted, *(name for name in missing if name and name not in accepted)))
    on_both = f"use {' and '.join(cures)} on both sides"
    if None in missing:
        cure = on_both
    else:
        cure = (
            f"{on_both}, or set {settings.ACCEPT}={wanted} here, which goes on where the rest of "
            "the handshake fits"
        )
    return PeerRefused(f"P's compatibility hash is not ours: {clause(explanation)}", cure)


def unexplained() -> PeerRefused:
    """Of a peer that differs nobody knows how."""
    return PeerRefused(
        "P's compatibility hash is not ours, and P differs in something that is not enumerable "
        "here (model, number of layers, drafter, a build that is no release), or in several things "
        "at once",
        "use one model, by one name, and one vLLM on both sides",
    )


def unfinished() -> PeerRefused:
    """Of a peer that may yet be told, by a processor with more time."""
    return PeerRefused(
        "P's compatibility hash is not ours, and what differs was not found in a second",
        "send the request again, which goes on looking",
    )


def _cure(difference: Difference) -> str:
    return _ON_BOTH[difference.factor]


def _all_of(found: Sequence[tuple[str, Any]]) -> str:
    """What one side is, in verbs."""
    values = dict(found)
    version, backend = values.get(factors.VERSION), values.get(factors.BACKEND)
    verbs = []
    if version is not None:
        verbs.append(f"runs vLLM {version}" + ("" if backend is None else f" with {backend}"))
    elif backend is not None:
        verbs.append(f"runs {backend}")
    verbs += [_verb(name, value) for name, value in found if name in _VERBS]
    return ", and ".join(verbs)


_VERBS = {
    factors.CACHE_DTYPE: "has --kv-cache-dtype {}",
    factors.DTYPE: "computes in {}",
    factors.MODE: "has a {} connector",
    factors.CONNECTOR_VERSION: "speaks version {} of the connector's protocol",
    factors.HYBRID: "has the hybrid KV cache manager {}",
    factors.CROSS_LAYERS: "has cross-layer blocks {}",
    factors.SPECULATION: "drafts {}",
}


def _verb(name: str, value: Any) -> str:
    shown = str(value).removeprefix("torch.")
    if isinstance(value, bool):
        shown = "on" if value else "off"
    if name == factors.SPECULATION:
        shown = "without the model's states" if value is None else "from the model's states"
    return _VERBS[name].format(shown)
