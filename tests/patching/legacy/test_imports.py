"""A release imports what old releases need only where it needs it itself."""

from __future__ import annotations

import pytest

from kvpatch.core.releases import FACTS

from ..standin import run, write_tree


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.33.0", set()),
        ("0.30.0", set()),
        ("0.29.0", {"failed_loads"}),
        ("0.20.1", {"failed_loads"}),
        ("0.15.1", {"aborted_loads", "unlike_engines", "failed_loads"}),
        ("0.13.0", {"aborted_loads", "failed_loads", "unlike_engines"}),
        ("0.11.0", {"unlike_engines"}),
        ("0.10.0", {"unlike_engines"}),
    ],
)
def test_what_a_process_imports_of_it(tmp_path, release, expected):
    facts = FACTS[release]
    tree = write_tree(tmp_path, facts, release)
    script = (
        "import importlib, json, sys, kvpatch; kvpatch.enable()\n"
        f"importlib.import_module({facts.connector.module!r})\n"
        "applied = [p.slug for p in kvpatch.status().patches if p.outcome == 'applied']\n"
        "print(json.dumps([applied, [m for m in sys.modules if m.startswith('kvpatch.legacy')]]))"
    )

    applied, modules = run(tree, script)

    assert "unlike_engines" in applied
    names = {module.removeprefix("kvpatch.legacy.") for module in modules}
    assert expected <= names
    assert expected or not modules, modules
