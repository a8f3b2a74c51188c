"""Fetches kvcached's source distributions: its Python code, and the C++ to be read.

Building it needs CUDA. Nothing of it is run here::

    python -m tests.releases.kvcached 0.1.6
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import cache
from .archives import fetch_source
from .fetch import FetchFailed

#: The newest release, which the lab runs.
NEWEST = "0.1.6"

#: Of the source distributions.
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
        FetchFailed: pip finds none, or what it finds is another; or it is not listed here.
    """
    if version not in _SHA256:
        raise FetchFailed(f"kvcached {version}: expected one of {', '.join(_SHA256)}")
    return fetch_source("kvcached", version, tree(version), _SHA256[version])


def main(versions: Sequence[str]) -> None:
    for version in versions or (NEWEST,):
        print(fetch(version))


if __name__ == "__main__":
    main(sys.argv[1:])
