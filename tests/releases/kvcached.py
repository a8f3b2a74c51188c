"""Fetches kvcached's source distributions: its Python code, and the C++ to be read.

Building it needs CUDA, and so does the metadata that pip asks of it. pip still says
where the archive lies and what its digest is (by the user's own index and settings)
before that fails; the archive is then read from there. Nothing of it is run here::

    python -m tests.releases.kvcached 0.1.6
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
from filelock import FileLock

from . import cache
from .fetch import FetchFailed

#: The newest release, which the lab runs.
NEWEST = "0.1.6"

_TIMEOUT_SECONDS = 60.0


#: Where the newest version is, for processes that see no settings of the tests.
PLACE = "LAB_KVCACHED_SOURCE"


def tree(version: str) -> Path:
    """Where a version's source is, once fetched."""
    if version == NEWEST and PLACE in os.environ:
        return Path(os.environ[PLACE])
    return cache.cache_root().parent / "kvcached" / version


def fetch(version: str) -> Path:
    """The unpacked source of a version, fetched where it is not there yet.

    Raises:
        FetchFailed: pip finds none, or what lies there is another.
    """
    final = tree(version)
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        if not final.is_dir():
            _fetch(version, final)
    return final


def _fetch(version: str, final: Path) -> None:
    url, digest = _archive(version)
    try:
        answer = httpx.get(url, follow_redirects=True, timeout=_TIMEOUT_SECONDS)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise FetchFailed(f"kvcached {version}: {error!r}") from error
    if hashlib.sha256(answer.content).hexdigest() != digest:
        raise FetchFailed(f"kvcached {version}: {url} is not the archive that pip named")
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{version}-") as scratch:
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            archive.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        unpacked.replace(final)


def _archive(version: str) -> tuple[str, str]:
    """(address, SHA-256) of the source distribution, as pip finds it."""
    command = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-cache-dir"]
    command += ["--no-binary=:all:", "--no-build-isolation", f"kvcached=={version}"]
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [*command, "--dest", folder], capture_output=True, text=True, check=False
        )
    said = answer.stdout + answer.stderr
    name = re.escape(f"kvcached-{version}.tar.gz")
    found = re.search(rf"(https?://\S+/{name})#sha256=([0-9a-f]{{64}})", said)
    if found is None:
        raise FetchFailed(f"pip finds no source distribution of kvcached {version}: {said[-500:]}")
    return found[1], found[2]


def main(versions: Sequence[str]) -> None:
    for version in versions or (NEWEST,):
        print(fetch(version))


if __name__ == "__main__":
    main(sys.argv[1:])
