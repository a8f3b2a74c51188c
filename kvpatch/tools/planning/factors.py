"""What both sides must have alike before a handshake compares a block: the compatibility hash.

From 0.13 on a worker states a hash of these, of options word by word, and refuses another one's;
before, it asserts that the attention backends have one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvpatch.core.errors import SEND_ONE, CannotPlan
from kvpatch.peer import peer_hash as hashed
from kvpatch.tools.planning.engine import PlannedEngine
from kvpatch.tools.planning.pair import Pair

Kind = Literal["content", "name", "word"]


@dataclass(frozen=True)
class Compared:
    """Something that is compared.

    Attributes:
        hashed: the name that the hash has for it; empty for what no hash has.
        of: what an engine has of it.
        kind: "content" changes what a block's bytes mean; "name" is compared by every release;
            "word" is how an option is written, which the hash alone looks at.
        since: whether only some releases that hash have it in the hash.
    """

    name: str
    hashed: str
    of: Callable[[PlannedEngine], object]
    cure: str
    kind: Kind = "content"
    since: bool = False


@dataclass(frozen=True)
class Factor:
    """Something that P and D have unlike."""

    compared: Compared
    theirs: str
    ours: str

    @property
    def cure(self) -> str:
        """What would help."""
        return self.compared.cure

    def __str__(self) -> str:
        return f"P and D differ in {self.compared.name}: {self.theirs} and {self.ours}"


_RELEASE = "vLLM's release"
_ONE_MODEL = "give both sides one model"

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


_FACTORS = (
    Compared(
        _RELEASE, hashed.VERSION, lambda e: e.facts.release, "use one release on both sides", "name"
    ),
    Compared(
        "--model", "model", lambda e: e.model.name, "give both sides one --model, word by word",
        "word",
    ),
    Compared("the layers", "num_hidden_layers", lambda e: e.model.layers, _ONE_MODEL),
    Compared("the KV heads", "num_kv_heads", lambda e: e.model.kv_heads, _ONE_MODEL),
    Compared("the heads' width", "head_size", lambda e: e.model.head_dim, _ONE_MODEL),
    Compared("the model's data type", "dtype", lambda e: e.model_dtype, "use one --dtype"),
    Compared("the cache's data type", "", lambda e: e.dtype, "use one --kv-cache-dtype"),
    Compared(
        "--kv-cache-dtype", hashed.CACHE_DTYPE,
        lambda e: e.arguments.option("kv_cache_dtype", "auto"),
        "give both sides one --kv-cache-dtype, word by word", "word",
    ),
    Compared(
        "the attention backend", hashed.BACKEND, lambda e: e.backend.name,
        "use one attention backend (VLLM_ATTENTION_BACKEND or --attention-backend)", "name",
    ),
    Compared(
        "--speculative-config", hashed.SPECULATION, _speculation,
        "give both sides one --speculative-config", "word", since=True,
    ),
    Compared(
        "enable_cross_layers_blocks", hashed.CROSS_LAYERS, has_cross_layer_blocks,
        "give both sides one enable_cross_layers_blocks in kv_connector_extra_config", "word",
        since=True,
    ),
    Compared(
        "transfer_mode", hashed.MODE, lambda e: "push" if e.is_push else "pull",
        "use one kv_connector on both sides", "word", since=True,
    ),
    Compared(
        "--disable-hybrid-kv-cache-manager", hashed.HYBRID,
        lambda e: bool(e.arguments.option("disable_hybrid_kv_cache_manager")),
        "give it to both sides, or to none", "word", since=True,
    ),
)  # fmt: skip

#: Of models with recurrent states; no hash has them, and no handshake compares what they come to.
_OF_STATES = (
    Compared(
        "the type of a convolution's states", "", lambda e: e.state_dtypes[0],
        "use one --mamba-cache-dtype",
    ),
    Compared(
        "the type of recurrent states", "", lambda e: e.state_dtypes[1],
        "use one --mamba-ssm-cache-dtype",
    ),
)  # fmt: skip


def compared_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike and are refused for."""
    found = _unlike(pair)
    if _is_hashed(pair):
        yield from found
    elif not pair.decode.facts.encodes_metadata:
        yield from (one for one in found if one.compared.kind == "name")


def uncompared_factors(pair: Pair) -> Iterator[Factor]:
    """What P and D have unlike, and nobody refuses, though the bytes mean something else."""
    if not _is_hashed(pair):
        yield from (one for one in _unlike(pair) if one.compared.kind == "content")
    if pair.decode.division is not None:
        yield from _unlike(pair, _OF_STATES)


def is_of_states_alike_in_size(pair: Pair, factor: Factor) -> bool:
    """Whether a factor is one of recurrent states that kvpatch cannot notice, by their bytes."""
    is_of_states = factor.compared in _OF_STATES
    return is_of_states and pair.prefill.state_item_bytes == pair.decode.state_item_bytes


def refuse_unseen(pair: Pair) -> None:
    """Refuses what a release neither compares nor anybody has seen.

    Raises:
        CannotPlan: there is such.
    """
    names = pair.decode.facts.hash_factors if _is_hashed(pair) else frozenset()
    for factor in _unlike(pair, hides=False):
        if factor.compared.since and factor.compared.hashed not in names:
            raise CannotPlan(
                f"P and D differ in {factor.compared.name}, which vLLM "
                f"{pair.decode.facts.release} does not compare",
                factor.cure,
            )
    if all(map(has_cross_layer_blocks, pair.sides)):
        raise CannotPlan(
            "enable_cross_layers_blocks is not planned for",
            "leave it out of kv_connector_extra_config",
        )
    if all(side.is_push for side in pair.sides):
        raise CannotPlan("push mode (NixlPushConnector) is not planned for", SEND_ONE)


def _unlike(
    pair: Pair, table: Sequence[Compared] = _FACTORS, *, hides: bool = True
) -> Iterator[Factor]:
    """What P and D have unlike: of two that vLLM has described, as its hash has it.

    Args:
        hides: whether what the hash of D's release does not have is left out.
    """
    names = pair.decode.facts.hash_factors
    theirs, ours = (side.factors for side in pair.sides)
    for one in table:
        if hides and one.since and one.hashed not in names:
            continue
        values = one.of(pair.prefill), one.of(pair.decode)
        if one.name == _RELEASE:
            values = versions(pair)
        elif one.hashed in theirs and one.hashed in ours:
            values = theirs[one.hashed], ours[one.hashed]
        if values[0] != values[1]:
            yield Factor(one, str(values[0]), str(values[1]))


def versions(pair: Pair) -> tuple[str, str]:
    """P's version and D's as they hash them; of sides that do not run, the release alone."""
    if _is_hashed(pair) and all(side.states_version for side in pair.sides):
        return pair.prefill.version, pair.decode.version
    return pair.prefill.facts.release, pair.decode.facts.release


def _is_hashed(pair: Pair) -> bool:
    d = pair.decode
    is_enforced = d.extra_config.get("enforce_handshake_compat") is not False
    return d.facts.encodes_metadata and is_enforced
