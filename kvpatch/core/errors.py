"""Every error that kvpatch raises, so that a caller can catch them by one name."""

from __future__ import annotations

import signal

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


class UnreadableGeometry(KvpatchError):
    """A tensor, a plane or a dimension order that cannot be read without guessing."""


class UnpairableBlocks(KvpatchError):
    """Block lists that do not hold the tokens that are asked for."""


class UnplannableCopy(KvpatchError):
    """Planes between which no exact copy exists, or segments that leave them."""


class DigestsRefused(KvpatchError):
    """Digests that cannot be made, added up or compared: of other blocks, seeds or ranges."""


class WitnessRefused(KvpatchError):
    """Caches of which the last token's slot says nothing, or cannot be looked at."""


class NoDigest(KvpatchError):
    """P's digest of a request that cannot be had: nothing is known of the load, good or bad."""


class PoolExhausted(KvpatchError):
    """Space is held by transfers of peers that are gone, and too little is left."""


class NothingToRead(KvpatchError):
    """A read of no bytes, which NIXL has no transfer for."""


class HostBufferRefused(KvpatchError):
    """A host buffer that cannot be, or a device that cannot do without one."""


class NeverFits(KvpatchError):
    """A request with more blocks than the pool has."""

    def __init__(self, request_id: str, blocks: int, host_blocks: int) -> None:
        super().__init__(
            f"request {request_id} needs {blocks} blocks of the host buffer, which has "
            f"{host_blocks}: set KVPATCH_HOST_BUFFER_BYTES to more"
        )
        self.blocks = blocks
        self.host_blocks = host_blocks


class NotSaved(KvpatchError):
    """Blocks that no host block holds for the request that wants to publish them."""


class NotReserved(KvpatchError):
    """More blocks saved for a request than host blocks were reserved for it."""


class NotProven(KvpatchError):
    """A request to be read from an engine of which something is not proven."""


class NotPatchedHere(KvpatchError):
    """A process without kvpatch was handed what only kvpatch can act on."""


class BadOptions(KvpatchError):
    """Options that no run can be made of."""


class CannotPlan(KvpatchError):
    """A pair of engines of which nobody can say from arguments alone what becomes of it."""


class IncompleteCache(KvpatchError):
    """The ranks' reports do not add up to one whole cache."""


class EngineFailed(KvpatchError):
    """A server that did not start, died, or refused what the harness needs of it."""


class RequestFailed(KvpatchError):
    """An engine answered with an error, or without what was asked for."""


class Interrupted(KvpatchError):
    """A signal ended the run; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class ReadRefused(FromOutside):
    """A request whose blocks do not hold the tokens that it needs."""


class UnlikePrompts(ReadRefused):
    """A request whose prompt is not the one that P holds: D computes it."""


class NoAnswer(FromOutside):
    """A peer that says nothing: it is dead, hangs, or is not where P said."""


class PeerRefused(FromOutside):
    """A peer whose cache cannot be read; a handshake puts both geometries before the reason."""

    def __init__(self, reason: str, cure: str = "") -> None:
        super().__init__(f"{reason}: {cure}" if cure else reason)
        self.reason = reason
        self.cure = cure


class ParamsRefused(FromOutside, ValueError):
    """A request whose parameters are wrong; vLLM's servers make "bad request" of ValueErrors."""
