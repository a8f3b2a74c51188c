"""What both sides must have alike before a handshake compares a block: the compatibility hash.

From 0.13 on a worker states a hash of these, of options word by word, and refuses another one's;
before, it asserts that the attention backends have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvpatch.connector.handshake import peer_hash as hashed
from kvpatch.core.errors import CannotPlan
from kvpatch.planning.engine import PlannedEngine
from kvpatch.planning.pair import Pair

Kind = Literal["content", "name", "word"]


@dataclass(frozen=True)
class Factor:
    """Something that P and D have unlike.

    Attributes:
        kind: "content" changes what a block's bytes mean; "name" is compared by every release;
            "word" is how an option is written, which the hash alone looks at.
    """

    name: str
    theirs: str
    ours: str
    cure: str
    kind: Kind = "content"

    def __str__(self) -> str:
        return f"P and D differ in {self.name}: {self.theirs} and {self.ours}"


_RELEASE = "vLLM's release"
_ONE_MODEL = "give both sides one model"

#: (name, what an engine has of it, what would help, its kind).
_Compared = tuple[str, Callable[[PlannedEngine], object], str, Kind]

_FACTORS: tuple[_Compared, ...] = (
    (_RELEASE, lambda e: e.facts.release, "use one release on both sides", "name"),
    ("--model", lambda e: e.model.name, "give both sides one --model, word by word", "word"),
    ("the layers", lambda e: e.model.layers, _ONE_MODEL, "content"),
    ("the KV heads", lambda e: e.model.kv_heads, _ONE_MODEL, "content"),
    ("the heads' width", lambda e: e.model.head_dim, _ONE_MODEL, "content"),
    ("the model's data type", lambda e: e.model_dtype, "use one --dtype", "content"),
    ("the cache's data type", lambda e: e.dtype, "use one --kv-cache-dtype", "content"),
    (
        "--kv-cache-dtype",
        lambda e: e.arguments.option("kv_cache_dtype", "auto"),
        "give both sides one --kv-cache-dtype, word by word",
        "word",
    ),
    (
        "the attention backend",
        lambda e: e.backend.name,
        "use one attention backend (VLLM_ATTENTION_BACKEND or --attention-backend)",
        "name",
    ),
)

#: Ways to draft without layers in the cache.
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def _speculation(engine: PlannedEngine) -> object:
    """How an engine drafts, as far as it counts: what reads the model's own states."""
    asked = dict(engine.arguments.mapping("speculative_config"))
    if not asked or asked.get("method") in _WITHOUT_LAYERS:
        return "none"
    names = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
    return ", ".join(f"{name} {asked[name]}" for name in names if asked.get(name) is not None)


def has_cross_layer_blocks(engine: PlannedEngine) -> bool:
    """Whether blocks of all layers are asked for in one piece."""
    asked = str(engine.extra_config.get("enable_cross_layers_blocks", False))
    return asked.strip().lower() in ("true", "1")


#: What the hash of some releases has beside these, by the name that it has there.
_HASHED_SINCE: dict[str, _Compared] = {
    hashed.SPECULATION: (
        "--speculative-config", _speculation, "give both sides one --speculative-config", "word",
    ),
    hashed.CROSS_LAYERS: (
        "enable_cross_layers_blocks", has_cross_layer_blocks,
        "give both sides one enable_cross_layers_blocks in kv_connector_extra_config", "word",
    ),
    hashed.MODE: (
        "transfer_mode", lambda e: "push" if e.is_push else "pull",
        "use one kv_connector on both sides", "word",
    ),
    hashed.HYBRID: (
        "--disable-hybrid-kv-cache-manager",
        lambda e: bool(e.arguments.option("disable_hybrid_kv_cache_manager")),
        "give it to both sides, or to none", "word",
    ),
}  # fmt: skip

#: Of models with recurrent states; no hash has them, and no handshake compares what they come to.
_OF_STATES: tuple[_Compared, ...] = (
    (
        "the type of a convolution's states",
        lambda e: e.state_dtypes[0],
        "use one --mamba-cache-dtype",
        "content",
    ),
    (
        "the type of recurrent states",
        lambda e: e.state_dtypes[1],
        "use one --mamba-ssm-cache-dtype",
        "content",
    ),
)


def compared_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike and are refused for."""
    if _is_hashed(pair):
        yield from differing_factors(pair)
    elif not pair.decode.facts.encodes_metadata:
        yield from (one for one in differing_factors(pair) if one.kind == "name")


def uncompared_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike, and nobody refuses, though the bytes mean something else."""
    if not _is_hashed(pair):
        yield from (one for one in differing_factors(pair) if one.kind == "content")
    if pair.decode.model.states is not None:
        yield from _unlike(pair, _OF_STATES)


def is_of_states_alike_in_size(pair: Pair, factor: Factor) -> bool:
    """Whether a factor is one of recurrent states that kvpatch cannot notice, by their bytes."""
    names = [name for name, *_ in _OF_STATES]
    return factor.name in names and pair.prefill.state_item_bytes == pair.decode.state_item_bytes


def differing_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike."""
    yield from _unlike(pair, _FACTORS)
    names = pair.decode.facts.hash_factors
    yield from _unlike(pair, (one for name, one in _HASHED_SINCE.items() if name in names))


def refuse_unseen(pair: Pair) -> None:
    """Refuses what a release neither compares nor anybody has seen.

    Raises:
        CannotPlan: there is such.
    """
    names = pair.decode.facts.hash_factors if _is_hashed(pair) else frozenset()
    for name, compared in _HASHED_SINCE.items():
        if name not in names and next(_unlike(pair, (compared,)), None) is not None:
            raise CannotPlan(
                f"P and D differ in {compared[0]}, which vLLM {pair.decode.facts.release} does "
                "not compare",
                compared[2],
            )
    if all(map(has_cross_layer_blocks, pair.sides)):
        raise CannotPlan("enable_cross_layers_blocks is not planned for")
    if all(side.is_push for side in pair.sides):
        raise CannotPlan("push mode (NixlPushConnector) is not planned for; pull mode is")


def _unlike(pair: Pair, factors: Iterable[_Compared]) -> Iterator[Factor]:
    for name, of, cure, kind in factors:
        theirs, ours = of(pair.prefill), of(pair.decode)
        if name == _RELEASE:
            theirs, ours = versions(pair)
        if theirs != ours:
            yield Factor(name, str(theirs), str(ours), cure, kind)


def versions(pair: Pair) -> tuple[str, str]:
    """P's version and D's as they hash them; of sides that do not run, the release alone."""
    if _is_hashed(pair) and all(side.arguments.running for side in pair.sides):
        return pair.prefill.version, pair.decode.version
    return pair.prefill.facts.release, pair.decode.facts.release


def _is_hashed(pair: Pair) -> bool:
    d = pair.decode
    is_enforced = d.extra_config.get("enforce_handshake_compat") is not False
    return d.facts.encodes_metadata and is_enforced
