"""What both sides must have alike before a handshake compares a block: the compatibility hash.

From 0.13 on a worker states a hash of these and refuses another one's; before, it asserts that
the attention backends have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpatch.planning.engine import PlannedEngine
from kvpatch.planning.pair import Pair


@dataclass(frozen=True)
class Factor:
    """Something that P and D have unlike.

    Attributes:
        is_content: whether it changes what a block's bytes mean.
    """

    name: str
    theirs: str
    ours: str
    cure: str
    is_content: bool = True

    def __str__(self) -> str:
        return f"P and D differ in {self.name}: {self.theirs} and {self.ours}"


#: (name, what an engine has of it, what would help, whether it changes what bytes mean).
_FACTORS: tuple[tuple[str, Callable[[PlannedEngine], object], str, bool], ...] = (
    ("vLLM's release", lambda e: e.facts.release, "use one release on both sides", False),
    ("the model", lambda e: e.model.name, "give both sides one --model", True),
    ("the layers", lambda e: e.model.layers, "give both sides one model", True),
    ("the KV heads", lambda e: e.model.kv_heads, "give both sides one model", True),
    ("the heads' width", lambda e: e.model.head_dim, "give both sides one model", True),
    ("the data type", lambda e: e.arguments.option("dtype", "auto"), "use one --dtype", True),
    ("the cache's data type", lambda e: e.dtype, "use one --kv-cache-dtype", True),
    (
        "the attention backend",
        lambda e: e.backend.name,
        "use one attention backend (VLLM_ATTENTION_BACKEND or --attention-backend)",
        False,
    ),
)


def compared_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike and are refused for."""
    if _is_hashed(pair):
        yield from differing_factors(pair)
    elif not pair.decode.facts.encodes_metadata:
        yield from (one for one in differing_factors(pair) if not one.is_content)


def uncompared_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike, and nobody refuses, though the bytes mean something else."""
    if not _is_hashed(pair):
        yield from (one for one in differing_factors(pair) if one.is_content)


def differing_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike."""
    for name, of, cure, is_content in _FACTORS:
        theirs, ours = of(pair.prefill), of(pair.decode)
        if theirs != ours:
            yield Factor(name, str(theirs), str(ours), cure, is_content)


def _is_hashed(pair: Pair) -> bool:
    extra = pair.decode.transfer.get("kv_connector_extra_config") or {}
    return pair.decode.facts.encodes_metadata and extra.get("enforce_handshake_compat") is not False
