"""Fetches the pure-Python tree of vLLM releases: ``python -m tests.releases.fetch``, of all.

pip resolves where a release's wheel lies (so that the user's own index and
settings hold), then only the members that are needed are read from it. A
release is unpacked beside its final place and renamed into it: an interrupted
fetch leaves nothing half-done, a second one goes on where the first stopped,
and two at once share the work.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from kvpatch.core.releases import RELEASES

from . import cache
from .ranges import fetch_members

#: At once: three quarters of the time is waiting for answers.
_TOGETHER = 4


class FetchFailed(RuntimeError):
    """A release's tree could not be had; says which and why."""


def fetch(releases: Sequence[str]) -> None:
    """Makes sure that the tree of each of `releases` is in the cache."""
    missing = [r for r in releases if not cache.is_fetched(r)]
    if not missing:
        return
    with (
        httpx.Client(follow_redirects=True, timeout=60.0) as client,
        ThreadPoolExecutor(_TOGETHER) as threads,
    ):
        futures = [threads.submit(_fetch_missing, client, release) for release in missing]
        try:
            for number, (release, future) in enumerate(zip(missing, futures, strict=True), 1):
                future.result()
                print(
                    f"fetched vLLM {release}, {number} of {len(missing)}",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            threads.shutdown(cancel_futures=True)


def _fetch_missing(client: httpx.Client, release: str) -> None:
    with cache.lock(release):
        if not cache.is_fetched(release):
            _fetch_one(client, release)


def _fetch_one(client: httpx.Client, release: str) -> None:
    url = wheel_url(release)
    final = cache.tree(release)
    with tempfile.TemporaryDirectory(dir=cache.cache_root(), prefix=f".{release}-") as scratch:
        archive = Path(scratch) / "wheel.zip"
        try:
            members = fetch_members(client, url, archive, _is_needed)
        except httpx.HTTPError as error:
            raise FetchFailed(f"vLLM {release}: {error!r}") from error
        unpacked = Path(scratch) / "tree"
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(unpacked, members)
        if final.exists():
            shutil.rmtree(final)
        unpacked.replace(final)


def _is_needed(member: str) -> bool:
    """Python code and the metadata from which the version is read."""
    return (member.startswith("vllm/") and member.endswith((".py", ".json", ".jinja"))) or (
        ".dist-info/" in member and member.endswith(("/METADATA", "/RECORD", "/entry_points.txt"))
    )


def wheel_url(release: str) -> str:
    """The address of the release's wheel, as pip finds it with its own settings."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    command += ["--ignore-installed", "--only-binary=:all:", "--no-cache-dir"]
    # Any interpreter of the supported range will do: only pure Python is read.
    command += ["--ignore-requires-python", "--report", "-", f"vllm=={release}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise FetchFailed(f"pip finds no wheel of vLLM {release}: {answer.stderr.strip()}")
    return str(json.loads(answer.stdout)["install"][0]["download_info"]["url"])


if __name__ == "__main__":
    fetch(RELEASES)
