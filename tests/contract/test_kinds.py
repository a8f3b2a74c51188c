"""Every spec class and every attention backend of every release is in the table of kinds."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache as kept

import pytest

from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.peer.peer_hash import BACKENDS as TRIED
from kvpatch.worker.cache_kinds import BACKENDS, DERIVED, DERIVES, SPECS, WITH_VARIABLE
from tests.releases import cache

from .kinds_page import NOT_PLAYED, PLAYED, kinds
from .tables import ROOT

pytestmark = pytest.mark.contract

#: Bases that no layer has.
_ABSTRACT = frozenset({"AttentionBackend", "AttentionSpec", "KVCacheSpec"})
#: Classes of releases, and kvpatch's own.
_OWN = {"TorchAttentionBackend"}
#: In the words of a docstring alone.
_EXAMPLES = {"CustomFullAttentionSpec"}
#: Where releases have such classes, of which each names its bases. Parsing takes a minute.
_FOLDERS = ("attention", "v1", "model_executor/layers", "model_executor/models", "models")
_CLASS = re.compile(r"^[ ]*class (\w+)\(([^()]*)\):", re.MULTILINE)
_BASE = re.compile(r"[\w.]+")


@kept
def classes_of(release: str) -> dict[str, frozenset[str]]:
    """The classes below each root, by the source alone."""
    bases: defaultdict[str, set[str]] = defaultdict(set)
    for folder in _FOLDERS:
        for path in (cache.tree(release) / "vllm" / folder).rglob("*.py"):
            for name, above in _CLASS.findall(path.read_text()):
                bases[name] |= {base.split(".")[-1] for base in _BASE.findall(above)}
    return {root: _below(root, bases) for root in ("AttentionBackend", "KVCacheSpec")}


def _below(root: str, bases: dict[str, set[str]]) -> frozenset[str]:
    found = {root}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found - _ABSTRACT - _EXAMPLES)


def missing(release: str) -> set[str]:
    found = classes_of(release)
    return (found["AttentionBackend"] - BACKENDS.keys()) | (found["KVCacheSpec"] - SPECS.keys())


@pytest.mark.parametrize("release", RELEASES)
def test_no_class_of_a_release_is_missing(release: str) -> None:
    """What the table lacks is refused to unlike peers: read what its blocks hold, and list it."""
    assert missing(release) == set()


def test_a_class_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BACKENDS, "DeepseekV32IndexerBackend")  # type: ignore[arg-type]
    monkeypatch.delitem(SPECS, "MambaSpec")  # type: ignore[arg-type]

    assert missing(RELEASES[-1]) == {"DeepseekV32IndexerBackend", "MambaSpec"}


def test_nothing_is_listed_that_no_release_has() -> None:
    backends = set().union(*(classes_of(release)["AttentionBackend"] for release in RELEASES))
    specs = set().union(*(classes_of(release)["KVCacheSpec"] for release in RELEASES))

    assert BACKENDS.keys() - backends == _OWN
    assert specs == SPECS.keys()
    assert WITH_VARIABLE.keys() <= BACKENDS.keys()


def test_every_kind_is_played_or_has_a_reason() -> None:
    assert sorted({kind.contents for kind in kinds()}) == sorted([*PLAYED, *NOT_PLAYED])
    assert all(NOT_PLAYED.values())


@pytest.mark.parametrize(("file", "test"), sorted(set(PLAYED.values())))
def test_what_plays_a_kind_is_there(file: str, test: str) -> None:
    """By the name of a test, or of a model in its table."""
    text = (ROOT / "tests" / "lab" / file).read_text()

    found = [
        f"def {name}(" in text or f'    "{name}": Model(' in text for name in (test, f"test_{test}")
    ]
    assert found == [True, False]


def test_backends_that_are_derived_have_these_names() -> None:
    """By the words that a release puts before another's name."""
    names = ("CrossAttention_", "ChunkedLocalAttention_64_16_", "FastPrefill", "StaticSink_")

    assert all(DERIVES.fullmatch(name) for name in names)
    assert not any(map(DERIVES.fullmatch, (*DERIVED, "", "Other", "Differential")))


_NAMED = re.compile(
    r"^[ ]*class (\w+)\([^()]*\):(?:(?!^[ ]*class ).)*?def get_name\([^)]*\)[^:]*:\s*"
    r'return "([^"]+)"',
    re.MULTILINE | re.DOTALL,
)


def test_every_backend_is_tried() -> None:
    names = {"CUSTOM"}
    for release in filter(lambda one: FACTS[one].states_hash, RELEASES):
        root = cache.tree(release) / "vllm"
        for folder in _FOLDERS:
            for path in (root / folder).rglob("*.py"):
                text = path.read_text()
                if "def get_name" in text:
                    names |= {name for owner, name in _NAMED.findall(text) if owner in BACKENDS}
    assert names == set(TRIED)
    assert len(set(TRIED)) == len(TRIED)
