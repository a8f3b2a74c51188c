"""What labs share of an import, and what each of them has to itself."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from . import ancestor


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [("json", True), ("tests.lab.ancestor", False), ("vllm.config", False), ("standin", False)],
)
def test_a_module_of_no_release_is_shared(name, is_shared, monkeypatch):
    if name not in sys.modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = json.__spec__  # another's, as that of a stand-in
    assert ancestor._is_shared(name) == is_shared


def test_what_one_release_alone_has_is_refused(tmp_path, monkeypatch):
    """Where something that all may import has imported vLLM: no lab would have its own."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    names = tmp_path / "imported.json"
    names.write_text(json.dumps(["json", "there_is_no_such_module"]))
    with pytest.raises(RuntimeError, match="a release's own was imported for all"):
        ancestor._import_all(names)
