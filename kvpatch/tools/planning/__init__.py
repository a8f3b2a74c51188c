"""Tells what becomes of a pair of engines, from their arguments, before either is started.

Neither torch nor vLLM is imported: the decision is the one of a handshake
(:mod:`kvpatch.peer.decision`), and what it is made of is worked out of arguments.
"""
