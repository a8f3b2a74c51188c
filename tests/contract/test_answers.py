"""What ``kvpatch plan`` asks of a running engine is what every release's API server answers."""

from __future__ import annotations

import re
from functools import cache as kept
from pathlib import Path

import pytest

from kvpatch.core.releases import RELEASES
from kvpatch.tools.planning.answers import (
    BACKEND_CLASSES,
    CACHE_INFO,
    CACHE_LABELS,
    CONFIGURED,
    IS_ASKED_FOR,
    VARIABLES,
)
from kvpatch.tools.planning.backends import BACKENDS
from tests.releases import cache
from tests.releases.fetch import fetch

pytestmark = pytest.mark.contract

#: From which release on something is answered; the rest is answered by all.
SINCE = {
    "the configuration as JSON": "0.11.0",
    "its variables": "0.14.0",
    "the attention backend": "0.13.0",
    "kv_cache_layout": "0.29.0",
    "prefill_context_parallel_size": "0.12.0",
    "decode_context_parallel_size": "0.10.2",
    "nnodes": "0.11.1",
    "mamba_cache_dtype": "0.10.1",
    "mamba_ssm_cache_dtype": "0.10.1",
}
_ENTRY = re.compile(r"(\w+) = \(?\s*\"[\w.]+\.(\w+)\"", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def _trees():
    fetch(RELEASES)


@kept
def _text(release: str, *folders: str) -> str:
    """All of a release's source below some folders, or in some files."""
    root = cache.tree(release) / "vllm"
    paths: list[Path] = []
    for folder in folders:
        place = root / folder
        paths += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return "\n".join(path.read_text() for path in paths if path.is_file())


def _has(release: str, what: str) -> bool:
    return RELEASES.index(release) >= RELEASES.index(SINCE.get(what, RELEASES[0]))


def _fields(release: str) -> set[str]:
    """Of all of vLLM's configurations."""
    return set(re.findall(r"^    (\w+):", _text(release, "config", "config.py"), re.MULTILINE))


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_tells_its_version_and_model(release):
    servers = _text(release, "entrypoints")

    assert re.search(r"\.get\(\"/version\"", servers)
    assert re.search(r"\{\"version\": VLLM_VERSION\}", servers)
    assert "root=base_model.model_path" in servers
    assert f'"{CACHE_INFO}"' in _text(release, "v1/metrics")


@pytest.mark.parametrize("release", RELEASES)
def test_the_caches_labels_are_fields_of_its_configuration(release):
    fields = _fields(release)

    assert "for key, value in self.__dict__.items()" in _text(release, "config", "config.py")
    for label in CACHE_LABELS:
        assert (label in fields) == _has(release, label), label
    # Where workers choose, a label says whether they had to.
    chooses = "update_block_size_for_backend(" in _text(release, "v1/executor")
    assert (IS_ASKED_FOR in fields) == chooses


@pytest.mark.parametrize("release", RELEASES)
def test_the_configuration_is_where_it_is_looked_for(release):
    servers, fields = _text(release, "entrypoints"), _fields(release)

    assert re.search(r"\.get\(\"/server_info\"", servers)
    is_json = "config_format" in servers
    assert is_json == _has(release, "the configuration as JSON")
    assert ('"vllm_env"' in servers) == _has(release, "its variables")
    for part, name in CONFIGURED.values():
        assert part in fields, part
        assert (name in fields) == _has(release, name), name
    known = _text(release, "envs.py")
    for name in {*VARIABLES} - {"VLLM_ATTENTION_BACKEND"}:  # of old releases alone
        assert f'"{name}"' in known, name


@pytest.mark.parametrize("release", RELEASES)
def test_backends_are_told_by_these_classes(release):
    has_option = (cache.tree(release) / "vllm" / "config" / "attention.py").is_file()
    assert has_option == _has(release, "the attention backend")
    if not has_option:
        return
    places = ("attention/backends/registry.py", "v1/attention/backends/registry.py")
    classes = dict(_ENTRY.findall(_text(release, *places)))

    assert set(BACKEND_CLASSES.values()) == BACKENDS.keys()
    assert {BACKEND_CLASSES[classes[name]]: name for name in BACKENDS} == {n: n for n in BACKENDS}
