"""Imports point one way (pyproject.toml), and what is one of a kind stands in one file."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu.__main__ import STAGES

from .messages import modules
from .tables import ROOT

pytestmark = pytest.mark.contract

_LINT = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _LINT],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        timeout=120,
    )


def test_the_layers_are_kept() -> None:
    done = _lint(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


def test_an_import_for_types_alone_counts(tmp_path: Path) -> None:
    for name in ("kvpatch", "experiments"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.sh")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / "kvpatch" / "core" / "text.py"
    for_types = "if TYPE_CHECKING:\n    from kvpatch.core.errors import KvpatchError\n"
    module.write_text(f"{module.read_text()}\nTYPE_CHECKING = False\n{for_types}")

    done = _lint(tmp_path)

    assert done.returncode == 1
    assert "no module imports itself by way of others BROKEN" in done.stdout, done.stdout


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_every_error_is_in_one_file() -> None:
    errors = "kvpatch/core/errors.py"
    known = {"Exception"} | {found.name for found in _classes(modules()[errors])}
    elsewhere = {
        f"{path}: {found.name}"
        for path, tree in modules().items()
        if path != errors
        for found in _classes(tree)
        if known & {ast.unparse(base).split(".")[-1] for base in found.bases}
    }

    assert len(known) > 20
    assert elsewhere == set()


#: The settings, the gate that asks whether one is set before anything of ours is imported, and
#: what hands this process's environment on to the engines that it starts.
_READ_THE_ENVIRONMENT = {
    "kvpatch/core/settings.py",
    "kvpatch/plugin.py",
    "kvpatch/tools/verify/engine.py",
}
_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _asks_for_the_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _ENVIRONMENT and ast.unparse(node.value) in ("os", "posix")
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return node.module in ("os", "posix") and bool(names & (_ENVIRONMENT | {"*"}))
    # Under another name the environment would be read past the first check.
    return isinstance(node, ast.Import) and any(
        alias.name in ("os", "posix") and alias.asname not in (None, alias.name)
        for alias in node.names
    )


def test_the_environment_is_read_in_one_place() -> None:
    found = {
        path
        for path, tree in modules().items()
        if any(map(_asks_for_the_environment, ast.walk(tree)))
    }

    assert found == _READ_THE_ENVIRONMENT


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os.environ['A']", True),
        ("os.getenv('A')", True),
        ("from os import environ", True),
        ("import os as system", True),
        ("import os", False),
        ("environment['A']", False),
    ],
)
def test_what_reads_the_environment(line: str, expected: bool) -> None:
    assert any(map(_asks_for_the_environment, ast.walk(ast.parse(line)))) is expected


def _imports_of_legacy(nodes: list[ast.AST]) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvpatch.legacy")
        for node in nodes
    )


def test_what_old_releases_need_is_imported_by_patches_and_lazily() -> None:
    doors = {
        path
        for path, tree in modules().items()
        if not path.startswith("kvpatch/legacy/") and _imports_of_legacy(list(ast.walk(tree)))
    }

    assert doors == {
        f"kvpatch/patches/{name}.py" for name in ("aborted_loads", "failed_loads", "unlike_engines")
    }
    assert not any(_imports_of_legacy(list(modules()[name].body)) for name in doors)


def test_the_gpu_kits_stages_start_scripts_that_are_there() -> None:
    scripts = [command[0] for stage in STAGES.values() for command in stage.commands]

    assert all(name == "-m" or (ROOT / name).is_file() for name in scripts), scripts
