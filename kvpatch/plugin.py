"""The ``vllm.general_plugins`` entry point.

vLLM calls it in the API server, the engine core and every worker. Without
``ENABLE_KVPATCH`` it must cost nothing, so it imports nothing before it asks.
"""

from __future__ import annotations

from kvpatch import _env


def load() -> None:
    """Enables kvpatch where ``ENABLE_KVPATCH`` says so.

    Raises:
        SettingsError: the variable holds something that is no yes and no no.
    """
    if not _env.is_enabled():
        return
    import kvpatch

    kvpatch.enable()
