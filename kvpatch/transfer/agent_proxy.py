"""A NIXL agent behind another object, which the release takes for the agent."""

from __future__ import annotations

from kvpatch.core.proxies import ObjectProxy


class AgentProxy(ObjectProxy):
    """What a class of this kind does not define is the agent's own.

    Each step asks it of each transfer. wrapt looks for an attribute in its own way first, as which
    it calls Python's; without that it takes a third of the time.
    """

    __getattribute__ = object.__getattribute__
