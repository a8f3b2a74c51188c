"""What labs share of an import, and what each of them has to itself."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from . import ancestor


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [("json", True), ("json.decoder", True), ("tests.lab.ancestor", False), ("nowhere", False)],
)
def test_what_was_imported_from_a_file_is_shared(name, is_shared, monkeypatch):
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    assert ancestor._is_shared(name) == is_shared


@pytest.mark.parametrize("name", ["vllm", "vllm.config", "kvpatch", "kvcached.utils"])
def test_a_releases_own_is_not(name, monkeypatch):
    module = ModuleType(name)
    module.__spec__ = json.__spec__
    monkeypatch.setitem(sys.modules, name, module)
    assert not ancestor._is_shared(name)


def test_a_stand_in_under_anothers_spec_is_not(monkeypatch):
    module = ModuleType("standin")
    module.__spec__ = json.__spec__
    monkeypatch.setitem(sys.modules, "standin", module)
    assert not ancestor._is_shared("standin")


def test_names_are_written_once_and_import_again(tmp_path):
    names = tmp_path / "imported.json"
    ancestor._write_down(names)
    found = json.loads(names.read_text())
    assert "json" in found
    assert not [name for name in found if name.partition(".")[0] in ("kvpatch", "tests", "vllm")]
    before = names.stat().st_mtime_ns
    ancestor._write_down(names)
    assert names.stat().st_mtime_ns == before


def test_what_one_release_alone_has_is_refused(tmp_path, monkeypatch):
    """Where something that all may import has imported vLLM: no lab would have its own."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    names = tmp_path / "imported.json"
    names.write_text(json.dumps(["json", "there_is_no_such_module"]))
    with pytest.raises(RuntimeError, match="a release's own was imported for all"):
        ancestor._import_all(names)
