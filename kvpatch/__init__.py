"""Moves KV caches between unlike vLLM engines: byte-identical, or refused.

This module imports neither vllm nor torch nor wrapt; :func:`enable` imports
what it needs when it is called.
"""

from __future__ import annotations

from kvpatch.core.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kvpatch.observe.status import Status

__all__ = ["__version__", "disable", "enable", "status"]


def enable() -> None:
    """Patches the NixlConnector of the installed vLLM, now or when it is imported.

    Calling it again changes nothing. It never raises for a vLLM that it cannot
    patch: constructing the connector then raises :class:`PatchRefused`, so that
    an engine without the connector still starts.

    Raises:
        SettingsError: a ``KVPATCH_*`` variable holds a value that cannot be taken.
    """
    from kvpatch.session import SESSION

    SESSION.enable()


def disable() -> None:
    """Undoes what :func:`enable` did, exactly; harmless when nothing was done.

    A method that something else has wrapped since then is left alone, with a
    warning: taking our wrapper out from under it would take theirs out too.
    """
    from kvpatch.session import SESSION

    SESSION.disable()


def status() -> Status:
    """Returns the status of this process: vLLM's release and generation, and a row per patch."""
    from kvpatch.session import SESSION

    return SESSION.status()
