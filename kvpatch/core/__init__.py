"""The base of every other part: facts of releases, settings, errors, status, the ledger.

Imports nothing else of kvpatch, and neither vllm nor torch.
"""
