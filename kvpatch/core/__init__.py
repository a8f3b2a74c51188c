"""What every other part stands on: settings, errors, status, and the ledger of what was wrapped.

Imports nothing else of kvpatch, and neither vllm nor torch.
"""
