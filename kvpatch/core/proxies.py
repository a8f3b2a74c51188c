"""The base of objects that stand in for vLLM's or NIXL's, the same with every wrapt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import wrapt

if TYPE_CHECKING:
    ObjectProxy: TypeAlias = wrapt.ObjectProxy[Any]
else:
    # wrapt < 2.2 has a class that is not generic, and other packages pin wrapt < 2.
    ObjectProxy = wrapt.ObjectProxy


class AgentProxy(ObjectProxy):
    """A NIXL agent behind another object, which the release takes for the agent.

    Each step asks it of each transfer. wrapt looks for an attribute in its own way first, as which
    it calls Python's; without that it takes a third of the time.
    """

    __getattribute__ = object.__getattribute__
