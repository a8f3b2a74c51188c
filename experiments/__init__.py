"""Benchmarks and set-ups that a person runs from a checkout; no part of the wheel."""
