"""The base of objects that stand in for vLLM's or NIXL's, the same with every wrapt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import wrapt

if TYPE_CHECKING:
    ObjectProxy: TypeAlias = wrapt.ObjectProxy[Any]
else:
    # wrapt < 2.2 has a class that is not generic, and other packages pin wrapt < 2.
    ObjectProxy = wrapt.ObjectProxy
