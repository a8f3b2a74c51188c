"""Every release's own hash, by its own code: each version and each backend is found."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.peer.peer_hash import (
    BACKENDS,
    Explanation,
    OwnFactors,
    digest_of,
    explain,
    own_factors,
)
from kvpatch.worker.cache_kinds import BACKENDS as CLASSES
from kvpatch.worker.release_worker import ReleaseWorker
from tests.releases import cache
from tests.releases.fetch import fetch

from .released_hash import ENGINE, ReleasedHash, _config, code_of

pytestmark = pytest.mark.contract

HASHING = [release for release in RELEASES if FACTS[release].states_hash]
#: The newest of each list of factors. Others of a list have its code, as a test here holds, and
#: search what it does: what takes seconds is played on these alone.
LISTS = list({FACTS[release].hash_factors: release for release in HASHING}.values())
#: Some of the backends that are found.
OTHERS = ("FLASHINFER", "TRITON_ATTN", "CPU_ATTN", BACKENDS[-1])
#: What can never be accepted, and is not looked for.
_NOT_FOUND: dict[str, Any] = {
    "cache_dtype": "fp8",
    "dtype": "torch.float16",
    "cross_layers_blocks": True,
    "is_hma_enabled": True,
    "transfer_mode": "push",
    "nixl_connector_version": 17,
    "speculative_config": "eagle",
    "model": "another/model",
    "num_kv_heads": 4,
    "head_size": 64,
    "num_hidden_layers": 33,
}


@pytest.fixture(scope="module", autouse=True)
def _trees() -> None:
    fetch(RELEASES)


def own(release: str, engine: dict[str, Any] = ENGINE, version: str = "") -> OwnFactors:
    """As D has it, from a worker of this release that has registered."""
    version = version or release
    facts = FACTS[release]
    worker = SimpleNamespace(
        vllm_config=_config(engine),
        backend_name=engine["attn_backend_name"],
        compat_hash=ReleasedHash(release, version).of(engine),
    )
    topology = SimpleNamespace(cross_layers_blocks=engine["cross_layers_blocks"])
    if facts.topology:
        setattr(worker, facts.topology, topology)
    with _installed(version):
        found = own_factors(ReleaseWorker(worker, facts))
    assert found is not None, "the hash is made of what the record says"
    return found


class _installed:  # noqa: N801
    """While inside, this vLLM is what is imported."""

    def __init__(self, version: str) -> None:
        self._patch = pytest.MonkeyPatch()
        self._version = version

    def __enter__(self) -> None:
        module = cast("Any", SimpleNamespace(__version__=self._version))
        self._patch.setitem(__import__("sys").modules, "vllm", module)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def hash_of(release: str, changes: dict[str, Any], version: str = "") -> str:
    """What a P states that is as `ENGINE`, but for these."""
    connector_version = changes.get("nixl_connector_version")
    made = ReleasedHash(release, version or release, connector_version)
    return made.of({**ENGINE, **changes})


def told(found: Explanation | None) -> tuple[str, str]:
    """The version and the backend that are said of P."""
    assert found is not None
    return found.version, found.backend


@pytest.mark.parametrize("release", HASHING)
def test_each_backend_is_named(release: str) -> None:
    ours = own(release)
    for backend in OTHERS:
        found = explain(ours, hash_of(release, {"attn_backend_name": backend}))
        assert told(found) == (release, backend)
        assert found is not None and found.factors == ("attn_backend",)


@pytest.mark.parametrize("release", HASHING)
def test_releases_of_one_list_of_factors_hash_by_one_code(release: str) -> None:
    newest = next(last for last in LISTS if FACTS[last].hash_factors == FACTS[release].hash_factors)
    assert code_of(release) == code_of(newest)


@pytest.mark.parametrize("release", HASHING)
def test_every_other_release_is_named(release: str) -> None:
    """Of all that hash; what they hash is by their own lists."""
    ours = own(release)
    for other in HASHING:
        if other != release:
            found = explain(ours, hash_of(other, {}))
            assert told(found) == (other, ENGINE["attn_backend_name"])
            assert found is not None and found.release == other
            assert found.factors == ("vllm_version",)


@pytest.mark.parametrize("release", HASHING)
def test_another_release_is_named_with_each_backend(release: str) -> None:
    """Each backend beside one of the releases, by chance."""
    ours, chance = own(release), random.Random(release)
    for backend in OTHERS:
        other = chance.choice([name for name in HASHING if name != release])
        found = explain(ours, hash_of(other, {"attn_backend_name": backend}))
        assert told(found) == (other, backend)
        assert found is not None and found.factors == ("vllm_version", "attn_backend")


@pytest.mark.parametrize("release", HASHING)
@pytest.mark.parametrize("build", ["+cpu", "+cu129", "+rocm700"])
def test_every_build_is_named(release: str, build: str) -> None:
    found = explain(own(release), hash_of(release, {}, release + build))
    assert told(found) == (release + build, ENGINE["attn_backend_name"])
    assert found is not None and found.release == release


@pytest.mark.parametrize("version", ["0.33.0rc1", "0.33.0.post1", "0.34.0"])
def test_what_is_no_release_is_not_named(version: str) -> None:
    """It could not be accepted."""
    assert explain(own("0.32.0"), hash_of("0.33.0", {}, version)) is None


@pytest.mark.parametrize("release", LISTS)
@pytest.mark.parametrize("factor", _NOT_FOUND)
def test_another_difference_is_not_named(release: str, factor: str) -> None:
    """Alone, nor beside one that would be."""
    if factor not in FACTS[release].hash_factors:
        pytest.skip("this release does not hash it")
    changes = {factor: _NOT_FOUND[factor]}
    assert explain(own(release), hash_of(release, changes)) is None
    changes["attn_backend_name"] = "FLASHINFER"
    assert explain(own(release), hash_of(release, changes)) is None


@pytest.mark.parametrize("release", HASHING)
def test_a_hash_of_something_else_is_not_taken_for_ours(release: str) -> None:
    facts = FACTS[release]
    topology = {facts.topology: SimpleNamespace(cross_layers_blocks=False)}
    worker = SimpleNamespace(
        vllm_config=_config(ENGINE),
        backend_name="FLASH_ATTN",
        compat_hash=hash_of(release, {"model": "another/model"}),
        **(topology if facts.topology else {}),
    )
    with _installed(release):
        assert own_factors(ReleaseWorker(cast("Any", worker), facts)) is None


@pytest.mark.parametrize("odd", ["", "no hash", "0" * 64, "g" * 64, "é" * 64])
def test_what_is_no_hash_is_not_named(odd: str) -> None:
    assert explain(own("0.33.0"), odd) is None


_NAMED = re.compile(
    r"^[ ]*class (\w+)\([^()]*\):(?:(?!^[ ]*class ).)*?def get_name\([^)]*\)[^:]*:\s*"
    r'return "([^"]+)"',
    re.MULTILINE | re.DOTALL,
)
_FOLDERS = ("attention", "v1", "model_executor/layers", "model_executor/models", "models")


def test_every_backend_is_tried() -> None:
    names = {"CUSTOM"}
    for release in HASHING:
        root = cache.tree(release) / "vllm"
        for folder in _FOLDERS:
            for path in (root / folder).rglob("*.py"):
                text = path.read_text()
                if "def get_name" in text:
                    names |= {name for owner, name in _NAMED.findall(text) if owner in CLASSES}
    assert names == set(BACKENDS)
    assert len(set(BACKENDS)) == len(BACKENDS)


def test_what_is_hashed_is_written_as_the_release_writes_it() -> None:
    values = {"a": 'ü "quoted"', "b": None, "c": [1, 2], "d": {"z": True, "y": 1}}
    release = ReleasedHash("0.33.0", "0.33.0")
    assert release._modules["vllm.config.utils"].hash_factors(values) == digest_of(values)
