"""The metrics of loads that an operator sees in ``/metrics``, next to vLLM's own of NIXL."""
