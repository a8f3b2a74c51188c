"""Source distributions, fetched by the user's own pip settings and never built; their archives."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from filelock import FileLock

from .fetch import FetchFailed

# pip asks a source distribution's build backend for metadata before it keeps the file. This one
# stands in for setuptools and copies what the distribution already has, so that nothing is built.
_BACKEND = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    lines = pathlib.Path("PKG-INFO").read_text(encoding="utf-8").splitlines()
    name, version = (
        next(line.partition(": ")[2] for line in lines if line.startswith(field))
        for field in ("Name: ", "Version: ")
    )
    folder = pathlib.Path(metadata_directory, f"{name.replace('-', '_')}-{version}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
"""


class UnsafeMember(ValueError):
    """A member of an archive that would lie outside of the folder, or is no file of its own."""


def fetch_source(
    distribution: str,
    version: str,
    final: Path,
    sha256: str | None = None,
    is_wanted: Callable[[str], bool] = lambda path: True,
) -> Path:
    """Unpacks a source distribution into `final`, where it is not there yet; returns `final`.

    Args:
        sha256: that it must have.
        is_wanted: asked for each path, below the folder that holds all of the archive.

    Raises:
        FetchFailed: pip finds none, or what it finds has another digest.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        if final.is_dir():
            return final
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}-") as scratch:
            archive = _download(distribution, version, Path(scratch))
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if sha256 not in (None, found):
                raise FetchFailed(f"{archive.name} has the SHA-256 {found}, expected {sha256}")
            with tarfile.open(archive) as tar:
                members = []
                for member in tar:
                    member.name = member.name.partition("/")[2]
                    if member.name and is_wanted(member.name):
                        members.append(member)
                unpack(tar, Path(scratch, "unpacked"), members)
            # Renamed only when it is whole: an interrupted fetch leaves nothing half-done.
            Path(scratch, "unpacked").replace(final)
    return final


def _download(distribution: str, version: str, scratch: Path) -> Path:
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", distribution]
    command += ["--dest", str(scratch), f"{distribution}=={version}"]
    environment = os.environ | {"PYTHONPATH": str(backend.parent)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    archives = list(scratch.glob("*.tar.gz"))
    if answer.returncode or not archives:
        raise FetchFailed(
            f"pip has no source distribution of {distribution} {version}: {answer.stderr[-500:]}"
        )
    return archives[0]


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
