"""What stands before a NIXL agent has the agent's attributes, and its own before them."""

from __future__ import annotations

import pytest

from kvpatch.core.proxies import AgentProxy
from kvpatch.transfer.agent_gate import AgentGate, EngineAgent

pytestmark = pytest.mark.patching


class _Agent:
    """Fake."""

    name = "of the agent"

    def transfer(self, handle: object) -> object:
        return handle


class _Proxy(AgentProxy):
    """Answers one call itself."""

    _self_asked = 0

    def check_xfer_state(self, handle: object) -> str:
        self._self_asked += 1
        return "PROC"


def test_its_own_come_first_and_all_else_is_the_agents() -> None:
    agent = _Agent()
    proxy = _Proxy(agent)
    assert proxy.check_xfer_state(1) == "PROC"
    assert proxy._self_asked == 1
    assert proxy.transfer(agent) is agent
    assert proxy.name == "of the agent"
    proxy.name = "another"
    assert agent.name == "another"
    assert not hasattr(agent, "_self_asked")
    assert proxy.__wrapped__ is agent
    assert isinstance(proxy, _Agent)
    assert proxy.__class__ is _Agent
    with pytest.raises(AttributeError, match="no_such_call"):
        proxy.no_such_call()
    both = _Proxy(EngineAgent(agent, gate := AgentGate()))
    assert both.transfer(agent) is agent
    assert both.gate is gate
    assert both.__class__ is _Agent
