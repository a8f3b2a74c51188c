"""The factors of the compatibility hash, as this engine has them.

A release hashes a few facts of an engine, by name, as one JSON object with sorted names. Which
facts these are is a record of each release's; what they are called and how they are written has
been the same since 0.13.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvpatch.connector.local.release_worker import ReleaseWorker
from kvpatch.core.releases import ReleaseFacts

VERSION = "vllm_version"
CONNECTOR_VERSION = "nixl_connector_version"
BACKEND = "attn_backend_name"
CACHE_DTYPE = "cache_dtype"
DTYPE = "dtype"
CROSS_LAYERS = "cross_layers_blocks"
HYBRID = "is_hma_enabled"
SPECULATION = "speculative_config"
MODE = "transfer_mode"


@dataclass(frozen=True)
class OwnFactors:
    """What this engine's hash is made of, and what it would be made of in other releases.

    Attributes:
        facts: of this engine's release.
        values: of every factor of any release, but for those that this one cannot tell.
    """

    facts: ReleaseFacts
    values: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The hash that the release makes of them."""
        return digest_of({name: self.values[name] for name in self.facts.hash_factors})


def digest_of(factors: Mapping[str, Any]) -> str:
    """The hash of some factors, as every release makes it."""
    texts = (fragment(name, factors[name]) for name in sorted(factors))
    return digest_of_fragments(texts).hex()


def fragment(name: str, value: Any) -> str:
    """A factor as it stands in what is hashed."""
    return f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}"


def digest_of_fragments(fragments: Iterable[str]) -> bytes:
    """The hash of factors that are written out, sorted by their names."""
    return sha256(f"{{{', '.join(fragments)}}}".encode()).digest()


def own_factors(release: ReleaseWorker) -> OwnFactors | None:
    """This engine's, once its worker has registered.

    Returns:
        None where the worker's own hash is made of something else.
    """
    import vllm

    worker, facts = release.worker, release.facts
    config = worker.vllm_config
    model, cache = config.model_config, config.cache_config
    topology = getattr(worker, facts.topology) if facts.topology else None
    is_hybrid = not config.scheduler_config.disable_hybrid_kv_cache_manager
    found: dict[str, Any] = {
        VERSION: vllm.__version__,
        CONNECTOR_VERSION: facts.connector_version,
        "model": model.model,
        DTYPE: str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        BACKEND: worker.backend_name,
        CACHE_DTYPE: str(cache.cache_dtype),
        CROSS_LAYERS: bool(getattr(topology, "cross_layers_blocks", False)),
        HYBRID: is_hybrid,
        MODE: "pull",  # of push mode nothing is named
    }
    if SPECULATION in facts.hash_factors or config.speculative_config is None:
        found[SPECULATION] = _speculation(config)
    own = OwnFactors(facts, found)
    try:
        is_known = own.digest == worker.compat_hash
    except TypeError:  # a value of a kind that no release puts into its hash
        return None
    return own if is_known else None


def _speculation(config: Any) -> dict[str, Any] | None:
    """What of drafting counts; nothing without a drafter that reads the model's states."""
    drafting = config.speculative_config
    if drafting is None or not drafting.use_eagle():
        return None
    draft = drafting.draft_model_config
    layers = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    found = {name: getattr(draft, name) for name in ("model", "revision", "code_revision")}
    return found | {
        "method": drafting.method,
        "parallel_drafting": drafting.parallel_drafting,
        CACHE_DTYPE_OF_DRAFT: str(drafting.kv_cache_dtype or config.cache_config.cache_dtype),
        "auxiliary_layer_ids": None if layers is None else list(layers),
    }


CACHE_DTYPE_OF_DRAFT = "kv_cache_dtype"
