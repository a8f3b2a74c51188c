"""The project's own lab of real engines: pairs that no user has to run, held against one engine.

The parts, in the order in which a run uses them; the rest is ``kvpatch.tools.verify``'s:

``pairs``            which heterogeneous pairs there are, ``kvcached_pairs`` those with kvcached
``models``           tiny random models of more kinds than a Llama
``torch_attention``  a reference attention backend, for NHD and HND caches on a CPU
``vector_kernels``   the CPU backend as on a processor without AMX, beside one with
``run``              each single engine once, then pair after pair
``report``           table and JSON lines of them
``recorded``         the data of README's table, made from a run of all pairs

The drill's, and the soak's: ``routed`` (requests through P and D, judged by one engine's answers),
``faults`` (engines are held up, killed and started again), ``scenes``.
"""
