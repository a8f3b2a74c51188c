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
from .archives import unpack
from .fetch import FetchFailed

#: The newest release, which the lab runs.
NEWEST = "0.1.6"

_TIMEOUT_SECONDS = 60.0

#: Of the source distributions. Where an index answers in JSON, pip 23 does not print them.
_SHA256 = {
    "0.1.2": "140bad438985c27aa941521c53cb5ef6da155ab34bc873477693010919bfc449",
    "0.1.3": "e2defe4d4427cb6462588e5d4966c4f7418ad6040368640cedd3e70cc041778d",
    "0.1.4": "75d80f04b8062592583e39d3dc83d70ff69e80c27def3fe9b9c864ddc64e75e0",
    "0.1.5": "1c82029fff197b5fa8a16b1e3dde9584844a446d996cf1fcefbeb0474b443614",
    "0.1.6": "4a1a428244b5e3667841e28f03a4a20be7066a21a856b2deaef727e18f845068",
}


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
        FetchFailed: pip finds none, or what lies there is another; or it is not listed here.
    """
    final = tree(version)
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        if not final.is_dir():
            _fetch(version, final)
    return final


def _fetch(version: str, final: Path) -> None:
    if version not in _SHA256:
        raise FetchFailed(f"kvcached {version}: expected one of {', '.join(_SHA256)}")
    url = _address(version)
    try:
        answer = httpx.get(url, follow_redirects=True, timeout=_TIMEOUT_SECONDS)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise FetchFailed(f"kvcached {version}: {error!r}") from error
    found = hashlib.sha256(answer.content).hexdigest()
    if found != _SHA256[version]:
        raise FetchFailed(
            f"kvcached {version}: {url} has the SHA-256 {found}, expected {_SHA256[version]}"
        )
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{version}-") as scratch:
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            unpack(archive, Path(scratch))
        (unpacked,) = Path(scratch).iterdir()
        unpacked.replace(final)


def _address(version: str) -> str:
    """Where the source distribution is, as pip finds it; what pip builds of it fails here."""
    command = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-cache-dir"]
    command += ["--no-binary=:all:", "--no-build-isolation", f"kvcached=={version}"]
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [*command, "--dest", folder], capture_output=True, text=True, check=False
        )
    said = answer.stdout + answer.stderr
    found = re.search(rf"https?://\S+/{re.escape(f'kvcached-{version}.tar.gz')}", said)
    if found is None:
        raise FetchFailed(f"pip finds no source distribution of kvcached {version}: {said[-500:]}")
    return found[0]


def main(versions: Sequence[str]) -> None:
    for version in versions or (NEWEST,):
        print(fetch(version))


if __name__ == "__main__":
    main(sys.argv[1:])
