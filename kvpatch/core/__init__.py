"""What every other part stands on: facts of releases, settings, errors, status, the ledger.

Imports nothing else of kvpatch, and neither vllm nor torch.
"""
