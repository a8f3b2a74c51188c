"""Every error that kvpatch raises, so that a caller can catch them by one name."""

from __future__ import annotations

import signal

from kvpatch.core.text import one_line

#: What helps where a proxy stands between a request and its blocks.
AS_ANSWERED = "pass on all of P's kv_transfer_params, as they are, with the prompt that P was sent"

#: What helps where nothing is known of a pair but what happens.
SEND_ONE = "start both with ENABLE_KVPATCH and send a request: D's log says if it reads P"
#: What helps where an engine answers with an error.
LOOK_INTO_LOG = "look into the log of that engine"


class KvpatchError(Exception):
    """Base of all of kvpatch's errors."""


class Mistake(KvpatchError):
    """A mistake of a user or an operator, or two engines that do not fit: it can be mended.

    `cure` says what to change: a clause that begins with a verb, without a full stop.
    """

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason, cure)  # both, or the error could not be pickled
        self.reason = reason
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.reason}: {self.cure}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class Fault(KvpatchError):
    """A fault of kvpatch, or a release or a backend that is unknown: users can only report it."""


class FromOutside(Mistake):
    """A client or a peer brought it about: the message is one line, and not a long one."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(one_line(reason), cure)


class SettingsError(Mistake):
    """An environment variable holds a value that kvpatch cannot take."""


class ReleaseNotKnown(Mistake):
    """The installed vLLM cannot be placed in a generation."""


class SiteDrifted(Fault):
    """A place that a patch wraps is not what the patch was written for.

    `expected` and `found` are clauses of a sentence, without a full stop.
    """

    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}")


class PatchRefused(Mistake):
    """A connector that would run half-patched, or a process without a patch that it needs."""


class RegistrationRefused(Mistake):
    """KV caches, or a host buffer, that cannot be registered without risking wrong bytes."""


class UnexpectedCaches(Fault):
    """KV caches that are not what the release's plan says, or that the device copies wrongly."""


class UnreadableGeometry(Fault):
    """A tensor, a plane or a dimension order that cannot be read without guessing."""


class UnexpectedRead(Fault):
    """A read that the release asks for in a way that kvpatch does not know."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnpairableBlocks(Fault):
    """Block lists that do not hold the tokens that are asked for."""


class UnplannableCopy(Fault):
    """Planes between which no exact copy exists, or segments that leave them."""


class DigestsRefused(Fault):
    """Digests that cannot be made, added up or compared: of other blocks, seeds or ranges."""


class NoDigest(KvpatchError):
    """P's digest of a request that cannot be had: nothing is known of the load, good or bad."""


class PoolExhausted(Mistake):
    """Space is held by transfers of peers that are gone, and too little is left."""


class NothingToRead(Fault):
    """A read of no bytes, which NIXL has no transfer for."""


class NeverFits(Mistake):
    """A request with more blocks than the pool has."""

    def __init__(self, request_id: str, blocks: int, host_blocks: int) -> None:
        super().__init__(
            f"request {request_id} needs {blocks} blocks of the host buffer, which has "
            f"{host_blocks}",
            "set KVPATCH_HOST_BUFFER_BYTES to more",
        )


class NotSaved(Fault):
    """Blocks that no host block holds for the request that wants to publish them."""


class NotReserved(Fault):
    """More blocks saved for a request than host blocks were reserved for it."""


class BadOptions(Mistake):
    """Options of which no run, and no plan of a pair of engines, can be made."""


class EngineFailed(KvpatchError):
    """A server that did not start, died, or refused or lacks what the harness needs of it."""


class RequestFailed(Mistake):
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


class AnswerGone(ReadRefused):
    """A request whose answer of P is of an earlier start of it, or another P: D computes it."""


class PeerRefused(FromOutside, RuntimeError):
    """A peer that is silent, or whose cache cannot be read: then with both geometries.

    vLLM refuses handshakes by RuntimeErrors.
    """


class ParamsRefused(FromOutside, ValueError):
    """A request whose parameters are wrong; vLLM's servers make "bad request" of ValueErrors."""
