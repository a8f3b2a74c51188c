"""Unpacks source archives, on each Python that is supported."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath


class UnsafeMember(ValueError):
    """A member of an archive that would lie outside of the folder, or is no file of its own."""


def unpack(
    archive: tarfile.TarFile, folder: Path, members: Iterable[tarfile.TarInfo] | None = None
) -> None:
    """Unpacks `members` (all by default) into `folder`, and nothing outside of it.

    Python's own filter does that from 3.10.12 and 3.11.4 on; Debian 12 has 3.11.2.

    Raises:
        UnsafeMember: a member would not lie inside, on a Python without that filter.
        tarfile.FilterError: the same on others.
    """
    wanted = list(archive.getmembers() if members is None else members)
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, wanted, filter="data")
        return
    for member in wanted:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
            raise UnsafeMember(f"expected files below one folder, found {member.name!r:.200}")
    archive.extractall(folder, wanted)
