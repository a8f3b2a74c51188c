"""Which versions of vLLM a peer may run, each with what the hash is made of there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from kvpatch.core.releases import FACTS, ReleaseFacts

#: What builds of a release put behind its version.
_LABELS = (
    *("", "+cpu", "+cu129", "+cu128", "+cu130", "+cu126", "+cu124", "+cu118", "+rocm700"),
    *("+rocm710", "+rocm711", "+rocm720", "+rocm721", "+rocm641", "+rocm630", "+xpu", "+tpu"),
    *("+empty", "+precompiled"),
)
#: Of builds that were no release, or that came after it.
_BUILDS = ("rc1", "rc2", "rc3", "rc4", "rc5", ".post1", ".post2")
#: Of a connector that is newer than any in the table.
_NEWER_CONNECTORS = 4


@dataclass(frozen=True)
class Frame:
    """A version that a peer may run.

    Attributes:
        version: as that vLLM states it.
        facts: of its release, or of the one that comes next to it.
        connector_version: as that vLLM would have it.
    """

    version: str
    facts: ReleaseFacts
    connector_version: int


def frame_of(version: str, facts: ReleaseFacts) -> Frame:
    """A build of a release."""
    return Frame(version, facts, facts.connector_version)


def other_frames(version: str, facts: ReleaseFacts) -> Iterator[Frame]:
    """All others, those that are met most first.

    Args:
        version: this engine's own, whose label a peer is likely to have.
        facts: of its release.
    """
    order = _by_distance(facts)
    own_label = version.partition("+")[1] + version.partition("+")[2]
    labels = tuple(dict.fromkeys((own_label, *_LABELS)))
    seen = {version}
    for label in labels:
        for of in order:
            yield from _new(frame_of(of.release + label, of), seen)
    for of in order:
        for build in _BUILDS:
            yield from _new(frame_of(of.release + build, of), seen)
    for name, of, connector_version in _neighbours(order):
        for label in (own_label, ""):
            yield from _new(Frame(name + label, of, connector_version), seen)
    yield from _new(frame_of("dev", facts), seen)


def release_of(version: str) -> str:
    """The release that a version is a build of; empty where the table has none."""
    try:
        public = Version(version).public
    except InvalidVersion:
        return ""
    return public if public in FACTS else ""


def _new(frame: Frame, seen: set[str]) -> Iterator[Frame]:
    key = f"{frame.version} {frame.connector_version}"
    if frame.version not in seen and key not in seen:
        seen.add(key)
        yield frame


def _by_distance(facts: ReleaseFacts) -> list[ReleaseFacts]:
    """Releases with a hash, the nearest to our own first."""
    every = list(FACTS.values())
    place = every.index(FACTS[facts.release])
    hashing = (of for of in every if of.states_hash)
    return sorted(hashing, key=lambda of: abs(every.index(of) - place))


def _neighbours(order: Sequence[ReleaseFacts]) -> Iterator[tuple[str, ReleaseFacts, int]]:
    """Releases that the table lacks, by what they would be called."""
    newest = max(order, key=lambda of: Version(of.release))
    for of in order:
        major, minor, micro = Version(of.release).release[:3]
        for later in (micro + 1, micro + 2):
            yield f"{major}.{minor}.{later}", of, of.connector_version
    major, minor, _ = Version(newest.release).release[:3]
    for more in (1, 2):
        for connector in range(_NEWER_CONNECTORS + 1):
            found = newest.connector_version + connector
            yield f"{major}.{minor + more}.0", newest, found
    for connector in range(1, _NEWER_CONNECTORS + 1):
        yield f"{major}.{minor}.1", newest, newest.connector_version + connector
