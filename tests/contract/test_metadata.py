"""Every field of an image that may stand alone is known to kvpatch."""

from __future__ import annotations

import ast

import pytest

from kvpatch.core.releases import RELEASES
from kvpatch.load.prompt_hashes import METADATA
from tests.releases import cache

pytestmark = pytest.mark.contract

_NAME = "embedding_fields"
#: No client sends it: Qwen's Omni processors add it to every video.
_ADDED = "use_audio_in_video"


def declared(text: str) -> set[str]:
    """The fields that classes of a source declare as metadata of embeddings."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if not any(isinstance(one, ast.Name) and one.id == _NAME for one in targets):
            continue
        for table in ast.walk(node):
            if isinstance(table, ast.Dict):
                for key, role in zip(table.keys, table.values, strict=True):
                    if isinstance(role, ast.Constant) and role.value == "metadata":
                        assert isinstance(key, ast.Constant)
                        found.add(str(key.value))
    return found


def of_release(release: str) -> set[str]:
    root = cache.tree(release) / "vllm"
    if _NAME not in (root / "multimodal/parse.py").read_text():
        return set()
    texts = (path.read_text() for path in root.rglob("*.py"))
    return set().union(*(declared(text) for text in texts if _NAME in text))


@pytest.mark.usefixtures("trees")
def test_the_fields_are_those_that_releases_declare() -> None:
    """One that is missing here ends D's engine: add it, once it is seen to have no content."""
    by_release = {release: of_release(release) for release in RELEASES}

    assert set().union(*by_release.values()) == METADATA - {_ADDED}
    assert [release for release in RELEASES if by_release[release]][0] == "0.28.0"
    assert "second_per_grid_ts" in by_release["0.33.0"] - by_release["0.32.0"]


@pytest.mark.usefixtures("trees")
def test_the_field_that_is_added_is_there() -> None:
    path = "vllm/model_executor/models/qwen2_5_omni_thinker.py"
    assert f'["{_ADDED}"] = ' in (cache.tree(RELEASES[-1]) / path).read_text()


def fields_of(release: str, name: str) -> set[str]:
    """The fields that a class of a release's images declares."""
    text = (cache.tree(release) / "vllm/multimodal/inputs.py").read_text()
    (found,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.usefixtures("trees")
def test_a_field_tells_that_it_stays_in_the_hosts_memory() -> None:
    """Where clients may send such fields alone (from 0.30 on)."""
    for release in RELEASES[RELEASES.index("0.30.0") :]:
        assert "field" in fields_of(release, "MultiModalFieldElem")
        assert "keep_on_cpu" in fields_of(release, "BaseMultiModalField")
    assert "keep_on_cpu" not in fields_of("0.12.0", "BaseMultiModalField")


def test_a_new_field_is_noticed() -> None:
    text = """
class Parser:
    embedding_fields = {**Other.embedding_fields, "audio": {"a": "values", "b": "metadata"}}
"""
    assert declared(text) == {"b"}
    assert declared(text.replace("fields = ", "fields: Mapping = ")) == {"b"}
    assert declared(text.replace("embedding_fields =", "others =")) == set()
