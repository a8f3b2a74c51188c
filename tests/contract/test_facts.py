"""Every fact of every release, against that release's source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from kvpatch.core.releases import FACTS, GENERATIONS, RELEASES, Place, ReleaseFacts
from tests.releases import cache

from . import facts
from .__main__ import _compare

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("trees")]


@pytest.mark.parametrize("release", RELEASES)
def test_a_releases_facts_are_those_of_its_source(release):
    assert facts.differences(FACTS[release], facts.read(release)) == {}


def test_a_release_without_the_connectors_classes_is_told_in_sentences(
    tmp_path, monkeypatch, capsys
):
    newest = RELEASES[-1]
    (tmp_path / newest).symlink_to(cache.tree(newest).resolve())
    monkeypatch.setenv("KVPATCH_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "500")

    assert _compare("9.9.9", FACTS[newest]) == 1

    told = capsys.readouterr().out
    assert "9.9.9 does not tell connector, " in told
    assert "nixl.base_worker.NixlBaseConnectorWorker" in told
    assert "defines register_kv_caches" in told


def test_every_fact_has_a_probe():
    stated = {field.name for field in fields(ReleaseFacts)} - set(facts.NAMES)
    assert stated == facts.PROBES.keys()


def test_a_generation_is_named_by_the_first_of_its_releases_which_follow_each_other():
    assert [release for of in GENERATIONS.values() for release in of] == list(RELEASES)
    for slug, releases in GENERATIONS.items():
        minor, micro = releases[0].split(".")[1:3]
        assert slug == f"g{int(minor):03d}{micro}"


def _another(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, Place):
        return replace(value, owner=f"{value.owner}Of")
    if value is None:
        return Place("vllm", "Another")
    if isinstance(value, frozenset):
        return value ^ {"block_size"}
    if isinstance(value, Mapping):
        return {**value, "ANOTHER": "packed"}
    if isinstance(value, tuple):
        return value[:-1] or ("another",)
    return value[:-1] or "another"


@pytest.mark.parametrize("release", ["0.10.0", "0.13.0", "0.20.1", RELEASES[-1]])
def test_negative_control_a_wrong_fact_is_noticed(release):
    found = facts.read(release)
    for name in facts.PROBES:
        right = getattr(FACTS[release], name)
        wrong = replace(FACTS[release], **{name: _another(right)})
        assert facts.differences(wrong, found) == {name: (_another(right), right)}
