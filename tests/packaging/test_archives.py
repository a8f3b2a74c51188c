"""Source archives unpack inside their folder, on Pythons with tarfile's own filter and without."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.releases.archives import UnsafeMember, unpack


def _archive(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarFile:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.size = kind, 3 if kind == tarfile.REGTYPE else 0
        member.linkname = "/" if kind == tarfile.SYMTYPE else ""
        archive.addfile(member, io.BytesIO(b"abc"))
    packed.seek(0)
    return tarfile.open(fileobj=packed)


@pytest.mark.parametrize("has_filter", [True, False])
def test_a_file_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_filter: bool
) -> None:
    _python(monkeypatch, has_filter)

    unpack(_archive("a/b.py"), tmp_path)

    assert (tmp_path / "a/b.py").read_bytes() == b"abc"


@pytest.mark.parametrize("has_filter", [True, False])
def test_nothing_is_written_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_filter: bool
) -> None:
    _python(monkeypatch, has_filter)
    refused = tarfile.FilterError if has_filter else UnsafeMember

    with pytest.raises(refused):
        unpack(_archive("../b.py"), tmp_path / "in")
    with pytest.raises(refused):
        unpack(_archive("link", tarfile.SYMTYPE), tmp_path / "in")

    assert not (tmp_path / "b.py").exists()
    assert not (tmp_path / "in/link").is_symlink()


def _python(monkeypatch: pytest.MonkeyPatch, has_filter: bool) -> None:
    if has_filter and not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no such filter")
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
