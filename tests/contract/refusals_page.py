"""docs/reference/refusals.md: every sentence that refuses something, with its cure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import messages
from .tables import ROOT, markdown

PAGE = ROOT / "docs" / "reference" / "refusals.md"

_HEAD = """\
# Refusals

Written by `python -m tests.contract --write` from the code that raises them; `…` is filled in at
run time.

kvpatch refuses what it cannot serve rightly, and says what to change. A refusal at the handshake
begins with `engine … cannot be read: it has …; we have …;` and both geometries. Only a fault of
kvpatch, or a release or a backend that it does not know, is to be reported. Search this page
for a few words of the line in your log; [Log lines and what to do](log_lines.md) has the others.
"""

#: An instruction, to the end of the sentence.
_CURE = re.compile(
    r"(?:^|(?:[:;.,]|\bor\b)\s+)(?:then |or |and )?"
    r"((?:set|use|say|give|keep|install|restart|wait|send|leave|uninstall|make|disable|speculate|pass"
    r"|run|let|unset|have|do not|both sides (?:need|must)|is the engine)\b.*)",
    re.IGNORECASE | re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When something is refused.

    Attributes:
        errors: the classes that are raised then.
        becomes: what becomes of the engine or the request.
        cure: what to do about a fault of kvpatch's: its sentence does not say it.
    """

    title: str
    errors: tuple[str, ...]
    becomes: str
    cure: str


MOMENTS = (
    Moment(
        "When kvpatch is turned on",
        ("SettingsError", "ReleaseNotKnown", "PatchRefused"),
        "A variable that cannot be read ends the process ([Variables](variables.md)). A release "
        "that cannot be patched still starts, and constructing the connector raises.",
        "",
    ),
    Moment(
        "When KV caches are registered",
        ("RegistrationRefused", "UnexpectedCaches", "UnreadableGeometry"),
        "The engine does not start.",
        "the tensors are not what this release's plan says: report it with this line; without "
        "`ENABLE_KVPATCH` the engine starts as stock does",
    ),
    Moment(
        "At the handshake",
        ("PeerRefused", "UnplannableCopy"),
        "The request fails as vLLM fails any load. Both engines stay up.",
        "use one vLLM, one kvpatch and one model on both sides; report it with this line where "
        "they are",
    ),
    Moment(
        "When a request is read",
        ("ReadRefused", "UnlikePrompts", "PoolExhausted", "UnexpectedRead", "UnpairableBlocks",
         "NothingToRead"),
        "That request fails by vLLM's load-failure policy; `<= 0.11.0` it waits until its client "
        "gives up. The others go on.",
        "report it with this line, and with what stands between P and D",
    ),
    Moment(
        "When a client's parameters are checked",
        ("ParamsRefused",),
        "The API server answers with an error that names the field; behind it the scheduler "
        "computes the prompt.",
        "",
    ),
    Moment(
        "When blocks go through a host buffer",
        ("NeverFits", "NotSaved", "NotReserved"),
        "P does not publish the request; D computes the prompt.",
        "report it with this line",
    ),
    Moment(
        "When a pair is planned",
        ("BadOptions", "RequestFailed"),
        "`kvpatch plan` ends with status 2.",
        "",
    ),
)  # fmt: skip
#: Its clauses stand in the sentence of a PatchRefused.
_CLAUSES = ("SiteDrifted",)
#: A line of the log has it as its reason: nothing is refused (docs/explanation/digests.md).
_REASONS = ("NoDigest",)
#: No engine raises them yet: digests are not made of loads so far.
_NOT_YET = ("DigestsRefused",)
#: A signal has ended a command.
_NOTHING_WRONG = ("Interrupted",)


def page() -> str:
    """The whole document.

    Raises:
        KeyError: an error belongs to no moment.
    """
    named = {error: moment for moment in MOMENTS for error in moment.errors}
    rows: dict[str, set[tuple[str, str]]] = {}
    for refusal in messages.refusals():
        if refusal.error in (*_CLAUSES, *_REASONS, *_NOT_YET, *_NOTHING_WRONG):
            continue
        moment = named[refusal.error]
        rows.setdefault(moment.title, set()).add(_row(refusal, moment))
    parts = [_HEAD]
    for moment in MOMENTS:
        table = markdown(("the log says", "what to do"), sorted(rows[moment.title]))
        parts.append(f"\n## {moment.title}\n\n{moment.becomes}\n\n{table}")
    return "".join(parts)


def _row(refusal: messages.Refusal, moment: Moment) -> tuple[str, str]:
    if refusal.cure:
        return _quoted(refusal.text), _quoted(refusal.cure)
    found = _CURE.search(refusal.text)
    if found is None:
        default = messages.cures().get(refusal.error)
        return _quoted(refusal.text), _quoted(default) if default else moment.cure
    return _quoted(refusal.text[: found.start()] or refusal.text), _quoted(found[1])


def _quoted(text: str) -> str:
    """Text of the code in a table's cell: no markup of its own."""
    return re.sub(r"([|*_<>`\[\]])", r"\\\1", text.strip().replace("\n", " "))
