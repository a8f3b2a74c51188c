"""Every error that kvpatch raises, so that a caller can catch them by one name."""

from __future__ import annotations

from kvpatch.core.text import one_line


class KvpatchError(Exception):
    """Base of all of kvpatch's errors."""


class FromOutside(KvpatchError):
    """What a client or a peer brought about: its message is one line, and not a long one."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class SettingsError(KvpatchError):
    """An environment variable holds a value that kvpatch cannot take."""


class ReleaseNotKnown(KvpatchError):
    """The installed vLLM cannot be placed in a generation."""


class SiteDrifted(KvpatchError):
    """A place that a patch wraps is not what the patch was written for.

    `expected` and `found` are clauses of a sentence, without a full stop.
    """

    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}")
        self.where = where
        self.expected = expected
        self.found = found


class PatchRefused(KvpatchError):
    """Raised by the tripwire, where a connector would otherwise run half-patched."""


class RegistrationRefused(KvpatchError):
    """KV caches that cannot be registered without risking wrong bytes."""
