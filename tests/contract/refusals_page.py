"""docs/reference/refusals.md: every sentence that refuses something, with its cure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import messages
from .tables import ROOT, markdown

PAGE = ROOT / "docs" / "reference" / "refusals.md"

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
        "An unreadable variable ends the process ([Variables](variables.md)). An engine whose vLLM "
        "cannot be patched starts, and constructing the connector raises.",
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
        ("ReadRefused", "UnlikePrompts", "AnswerGone", "PoolExhausted", "UnexpectedRead",
         "UnpairableBlocks", "NothingToRead"),
        "The request fails by `kv_load_failure_policy`; `<= 0.11.0` it waits until its client "
        "gives up. Other requests go on.",
        "report it with this line, and with what stands between P and D",
    ),
    Moment(
        "When a client's parameters are checked",
        ("ParamsRefused",),
        "The API server answers with an error that names the field. The scheduler, for requests "
        "that came another way, computes the prompt.",
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
_MANY = 40
#: The first that matches; the words are the sentences' own.
TOPICS = {
    "kvcached": "(?i)kvcached",
    "Host buffers and devices": "host buffer|HOST|device|staging|storage",
    "Recurrent states and rings": r"state\b|states\b|\bring|circular|mamba",
    "Releases, hashes and attention backends": r"(?i)vllm|release|hash|backend|kvpatch",
    "Ranks and heads": "rank|head|context parallel|pipeline",
    "Blocks and layouts": "block|layout|token|tile|column|kernel",
    "Others": "",
}
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
    parts = [PAGE.read_text().partition("\n## ")[0]]
    for moment in MOMENTS:
        found = sorted(rows[moment.title])
        mistakes = [row for row in found if row[1] != moment.cure]
        parts.append(f"\n## {moment.title}\n\n{moment.becomes}\n\n{_tables(mistakes)}")
        faults = "".join(f"- {text}\n" for text, cure in found if cure == moment.cure)
        if faults:
            parts.append(f"\n### Faults\n\nWhat to do about each: {moment.cure}.\n\n{faults}")
    return "".join(parts)


def _tables(rows: list[tuple[str, str]]) -> str:
    """One table, or one for each topic where there are many rows."""
    columns = ("the log says", "what to do")
    if len(rows) < _MANY:
        return markdown(columns, rows)
    by_topic: dict[str, list[tuple[str, str]]] = {topic: [] for topic in TOPICS}
    for row in rows:
        by_topic[next(t for t, words in TOPICS.items() if re.search(words, row[0]))].append(row)
    found = (
        f"### {topic}\n\n{markdown(columns, of_topic)}"
        for topic, of_topic in by_topic.items()
        if of_topic
    )
    return "\n".join(found)


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
