"""One problem per file, named by its slug; this is the order in which they are applied.

The last one wraps outermost: block counts are set and checked first, then
split tensors are shown as what they are, then shared ones are thinned out.
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
    "failed_loads",
    "aborted_loads",
    "host_buffer",
    "handshake_listener",
    "transfer_params",
)


#: Those that wrap the API server too, which need not import the connector.
FRONT_ENDS = ("transfer_params",)


def load_one(slug: str) -> Patch:
    """One patch."""
    found: Patch = import_module(f"{__name__}.{slug}").PATCH
    return found


def load() -> tuple[Patch, ...]:
    """All patches. They are imported when the connector is, so that others pay nothing."""
    return tuple(map(load_one, SLUGS))
