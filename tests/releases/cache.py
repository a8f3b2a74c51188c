"""Where the fetched source trees lie, and the lock that guards one of them."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock

_REPOSITORY = Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    """The folder of all fetched trees; ``KVPATCH_TEST_CACHE`` moves it."""
    override = os.environ.get("KVPATCH_TEST_CACHE")
    return Path(override).resolve() if override else _REPOSITORY / ".cache" / "vllm"


def tree(release: str) -> Path:
    """The folder that goes on ``sys.path`` to import ``vllm`` of `release`."""
    return cache_root() / release


def is_fetched(release: str) -> bool:
    """Whether the tree is whole: it is renamed into place only when it is."""
    return (tree(release) / "vllm" / "__init__.py").is_file()


def lock(release: str) -> FileLock:
    """Held while one process fetches `release`; others wait and then find it."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    return FileLock(root / f".{release}.lock")
