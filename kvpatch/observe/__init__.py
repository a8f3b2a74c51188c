"""What an operator sees of loads, in ``/metrics`` next to vLLM's own of NIXL."""
