"""The ``vllm.general_plugins`` entry point.

vLLM calls it in the API server, the engine core and every worker. Without
``ENABLE_KVPATCH`` it must cost nothing, so it imports no module of ours, not
even the one that reads settings, before it knows that the variable is set.
"""

from __future__ import annotations

import os


def load() -> None:
    """Enables kvpatch where ``ENABLE_KVPATCH`` says so.

    Raises:
        SettingsError: the variable holds something that is no yes and no no.
    """
    if not os.environ.get("ENABLE_KVPATCH"):
        return
    import kvpatch
    from kvpatch.core import settings

    if settings.is_enabled():
        kvpatch.enable()
