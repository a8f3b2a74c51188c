"""The lab: real connector workers of any release over real NIXL, without an engine.

``Lab(release)`` starts an interpreter that sees that release's pure-Python tree
first, and forks from it a prefill and a decode process. Each holds the real
scheduler-side and worker-side connector of the release; caches lie in host
memory and travel over UCX. See ``case.py`` for what can be asked, ``standins.py``
for everything that is not the release's own.
"""

from __future__ import annotations

from .case import Case, EngineSpec, Report
from .host import Lab

__all__ = ["Case", "EngineSpec", "Lab", "Report"]
