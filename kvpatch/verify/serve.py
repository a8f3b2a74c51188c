"""vLLM's API server for several engines on few cores; else as the module itself starts it.

An engine core and its workers wait for each other by calling ``sched_yield`` in a loop for up to
a second. Where more such loops than cores run side by side, Linux 6.18 was seen to leave other
runnable threads without a slice for 50 s, NIXL's own among them, so that transfers stood still
and engines ended on vLLM's 300 s timeout. Here each turn of such a loop sleeps instead. Nothing
that is computed or transferred depends on it.

Engine cores and workers are started afresh and import the main module again, so they get it too.
"""

from __future__ import annotations

import os
import runpy
import time

_SERVER = "vllm.entrypoints.openai.api_server"
_REST_S = 50e-6


def _rest() -> None:
    time.sleep(_REST_S)


os.sched_yield = _rest

if __name__ == "__main__":
    # The main module must stay this one: it is what the processes that follow import.
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=False)
