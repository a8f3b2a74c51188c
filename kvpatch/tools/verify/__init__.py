"""Prove that a prefill/decode pair gives a single engine's tokens, and its cache bytes.

The parts, in the order in which a run uses them:

``model``        a tiny random model, so that nothing has to be downloaded, and the prompts
``engine``       which engines a set-up is made of, and their processes
``handoff``      what a proxy does between a prefill and a decode engine
``probe``        runs inside the engine's worker: reads the cache of each request
``compare``      digests of caches that do not depend on their layout, and what differs
``run``          each set-up's engines, started together and asked all prompts

Nothing here patches vLLM: the probe is brought in by vLLM's own ``--worker-extension-cls``, so a
stock engine is observed in the same way as one with kvpatch.
"""
