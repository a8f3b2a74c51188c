"""Trees of builds that are not listed: a release's under another version, or with changed files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .cache import tree


def renamed(
    release: str, version: str, root: Path, changed: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Makes a tree of links to a release's files.

    Args:
        root: a folder that does not exist yet.
        changed: the text of files that are others, by their paths below the tree.
    """
    _link(tree(release) / "vllm", root / "vllm", {Path("__init__.py"), *_below_vllm(changed)})
    for path, text in changed.items():
        (root / path).unlink()
        (root / path).write_text(text)
    info = root / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    return root


def _below_vllm(changed: Mapping[str, str]) -> set[Path]:
    return {Path(path).relative_to("vllm") for path in changed}


def _link(original: Path, copy: Path, files: set[Path]) -> None:
    """Links all of a folder; folders of `files` are made, and where it lies is not the link's."""
    copy.mkdir(parents=True)
    for path in original.iterdir():
        inside = {f.relative_to(path.name) for f in files if f.parts[0] == path.name} - {Path()}
        if inside:
            _link(path, copy / path.name, inside)
        elif Path(path.name) in files:
            (copy / path.name).write_bytes(path.read_bytes())
        else:
            (copy / path.name).symlink_to(path)
