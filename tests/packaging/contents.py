"""``contents.py SOURCE ARCHIVE...``: what an sdist and a wheel hold, against the tracked files."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

_ENTRY_POINTS = ("kvpatch = kvpatch.__main__:main", "kvpatch = kvpatch.plugin:load")
_BESIDE_MODULES = {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}


def main(source: Path, archives: list[Path]) -> str:
    """What is wrong; empty where nothing is."""
    package = {
        path.relative_to(source).as_posix()
        for path in (source / "kvpatch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    problems = [f"expected one sdist and one wheel, found {len(archives)} files"]
    if {path.suffix for path in archives} == {".whl", ".gz"}:
        problems = []
    for archive in archives:
        found = wheel(archive, package) if archive.suffix == ".whl" else sdist(archive, package)
        problems += [f"{archive.name}: {problem}" for problem in found]
    return "\n".join(problems)


def wheel(path: Path, package: set[str]) -> list[str]:
    """The package, whole, nothing beside it, and the entry points."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entries = next(n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        stated = archive.read(entries).decode()
    return _differences(names, package) + [
        f"no entry point {entry}" for entry in _ENTRY_POINTS if entry not in stated
    ]


def sdist(path: Path, package: set[str]) -> list[str]:
    """The package, and what it is built and read with."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = package | _BESIDE_MODULES
    return _differences(names & expected, expected)


def _differences(found: set[str], expected: set[str]) -> list[str]:
    return [f"{name} is missing" for name in sorted(expected - found)] + [
        f"{name} should not be there" for name in sorted(found - expected)
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]) or 0)
