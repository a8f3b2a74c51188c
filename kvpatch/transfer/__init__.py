"""Moves bytes: plans into NIXL transfers, tails into zeros. torch and NIXL, no vLLM."""
