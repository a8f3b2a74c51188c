"""Engines whose NIXL threads sleep between two looks.

NIXL's Python API sets no wait, so that the progress thread of each agent takes a core while its
engine idles or starts. Of two or three engines on two cores that is most of what there is. With
this folder on PYTHONPATH vLLM finds the plugin in each process; what is sent and read stays NIXL's
own. ``tests/run.sh`` puts it there, and no benchmark does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: The lab's agents too (``tests/lab/standins.py``).
_WAIT_US = 200


def register() -> None:
    bindings = import_module("nixl._api").nixl_agent.__init__.__globals__["nixlBind"]
    make = bindings.nixlAgent

    def patient(name: str, config: Any) -> Any:
        config.pthrDelay = _WAIT_US
        return make(name, config)

    bindings.nixlAgent = patient
