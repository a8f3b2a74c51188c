"""One problem per file, named by its slug; this is the order in which they are applied.

Where two wrap one method the later one is outermost. What is done to the tensors of a KV cache
has an order of its own, whichever patches are on: :mod:`kvpatch.load.registration`. What
vLLM calls in each step of the engine has one wrapper for all patches that have a part there:
:mod:`kvpatch.worker.engine_steps`, :mod:`kvpatch.worker.envelope`.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvpatch.core.ledger import Patch

SLUGS = (
    "kvcached_layout",
    "shared_tensors",
    "kvcached_regions",
    "block_count",
    "unlike_engines",
    "named_factors",
    "failed_loads",
    "aborted_loads",
    "side_channel_key",
    "unlike_releases",
    "host_buffer",
    "stale_blocks",
    "digests",
    "handshake_listener",
    "transfer_params",
    "same_prompt",
    "metrics",
)


#: Those that wrap the API server too, which need not import the connector.
FRONT_ENDS = ("transfer_params",)


def load_one(slug: str) -> Patch:
    """Imports one patch."""
    found: Patch = import_module(f"{__name__}.{slug}").PATCH
    return found


def load() -> tuple[Patch, ...]:
    """Imports all patches, once the connector is imported, so that other processes pay nothing."""
    return tuple(map(load_one, SLUGS))
