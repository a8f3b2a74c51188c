"""vLLM's connector in our terms: worker and scheduler objects in, geometry and decisions out.

``local`` has what this worker registered, ``handshake`` what a peer states and what becomes of it,
``reading`` a request's read, ``host_buffer`` and ``kvcached`` what those two allocations add. The
files beside them hold these together: the state of a worker and of a scheduler, the registration.
"""
