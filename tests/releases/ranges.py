"""Reads chosen members of a remote zip file by HTTP range requests.

A vLLM wheel is up to 600 MB, its Python code 12 MB in a handful of runs. We
copy just those runs into a sparse local file at their own offsets and let
``zipfile`` do the rest, its CRC checks included.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import httpx

# Members closer together than this are fetched in one request: a round trip
# costs about as much as this many bytes.
_GAP_BYTES = 256 * 1024
# Holds the central directory of every vLLM wheel so far (0.7 MB at most).
_TAIL_BYTES = 2 * 1024 * 1024
# A local header is its fixed 30 bytes, the name, and an extra field whose
# length only the header itself tells.
_LOCAL_HEADER_BYTES = 30 + 512

_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


class RangesNotServed(RuntimeError):
    """The server answers a range request with something else."""


def fetch_members(
    client: httpx.Client, url: str, archive: Path, wanted: Callable[[str], bool]
) -> list[str]:
    """Copies the members of `url` that are `wanted` into the sparse `archive`.

    Returns their names; ``zipfile.ZipFile(archive)`` can then open each.
    """
    size_bytes = _size_bytes(client, url)
    tail = max(0, size_bytes - _TAIL_BYTES)
    with archive.open("wb") as file:
        file.truncate(size_bytes)
        _copy(client, url, tail, size_bytes, file)
        file.flush()
        with zipfile.ZipFile(archive) as directory:
            members = [m for m in directory.infolist() if wanted(m.filename)]
        for start, stop in _runs(members, tail):
            _copy(client, url, start, min(stop, size_bytes), file)
    return [m.filename for m in members]


def _runs(members: Iterable[zipfile.ZipInfo], tail: int) -> list[tuple[int, int]]:
    """Byte ranges that cover `members`, near ones merged, none within the tail."""
    runs: list[tuple[int, int]] = []
    for member in sorted(members, key=lambda m: m.header_offset):
        start = member.header_offset
        stop = start + _LOCAL_HEADER_BYTES + len(member.filename) + member.compress_size
        if start >= tail:
            continue
        if runs and start - runs[-1][1] < _GAP_BYTES:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop))
        else:
            runs.append((start, stop))
    return runs


def _size_bytes(client: httpx.Client, url: str) -> int:
    response = client.get(url, headers={"Range": "bytes=0-0"})
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if response.status_code != 206 or match is None:
        raise RangesNotServed(f"{url}: status {response.status_code} to a range request")
    return int(match[1])


def _copy(client: httpx.Client, url: str, start: int, stop: int, file: BinaryIO) -> None:
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code != 206:
            raise RangesNotServed(f"{url}: status {response.status_code} to a range request")
        file.seek(start)
        for chunk in response.iter_bytes():
            file.write(chunk)
    if file.tell() != stop:
        raise RangesNotServed(f"{url}: bytes {start} to {stop} ended at {file.tell()}")
