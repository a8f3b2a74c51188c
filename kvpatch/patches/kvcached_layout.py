"""kvcached's tensors stay as kvcached laid them out.

Why:
    The connector asks vLLM for the HND layout, and vLLM then re-strides every
    layer's tensor. kvcached hands out tensors over virtual memory whose strides
    cannot be changed: ``[2, 4096, 16, 8, 128]`` fails in ``set_stride`` while
    the engine starts.
Where:
    The engine core and every worker, on P and on D.
How:
    With kvcached active the connector asks for no layout, which leaves NHD.
    Everywhere else it answers as before, and so it does from 0.29 on, where vLLM makes
    the views of kvcached's memory itself, in the layout that it was asked for: there this
    patch only takes the place of kvcached's own, which asks for none and refuses the
    contiguous layout.
Upstream:
    kvcached #311, patched there for some releases in #312.
Remove when:
    kvcached's tensors can be re-strided, or no supported release has the hook.
"""

from __future__ import annotations

from typing import Any

from kvpatch.core import seams, settings
from kvpatch.core.ledger import Patch, Site, Wrapped, Wrapper
from kvpatch.core.releases import ReleaseFacts


def _get_required_kvcache_layout(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    if settings.is_kvcached_enabled():
        return None
    return wrapped(*args, **kwargs)


def _as_ever(wrapped: Wrapped, instance: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    if not facts.asks_for_layout:
        return {}
    # Where layouts have names vLLM lays kvcached's memory out by its own plan and views.
    wrapper = _as_ever if facts.names_layouts else _get_required_kvcache_layout
    return {seams.get_required_kvcache_layout(facts): wrapper}


PATCH = Patch(
    slug="kvcached_layout",
    wire_affecting=True,
    sites=_sites,
    not_needed="this release asks for no layout; the hook came with 0.10.1",
    document=__doc__,
)
