"""What the variables may hold; each is refused where kvpatch is turned on."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvpatch.core import settings
from kvpatch.core.errors import SettingsError
from kvpatch.tools.cli import app

SIZES = {"KVPATCH_HOST_BUFFER_BYTES": settings.host_buffer_bytes}
SIZES["KVPATCH_STAGING_BYTES"] = settings.staging_bytes
CHOICES = {
    "KVPATCH_HOST_BUFFER": settings.host_buffer,
    "KVPATCH_TRANSFER": settings.transfer_mode,
    "KVPATCH_PROGRESS": settings.progress,
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in (*SIZES, *CHOICES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_a_whole_number_of_bytes(monkeypatch, name):
    monkeypatch.setenv(name, " 123456789 ")
    assert SIZES[name]() == 123456789
    for value in ("4GiB", "0", "-1", "1.5", "1e9", "1 2", "²", "0x10"):
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match="whole number of bytes above 0") as error:
            SIZES[name]()
        assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those_there_are(monkeypatch, name):
    assert CHOICES[name]() == "auto"
    monkeypatch.setenv(name, "AUTO")
    assert CHOICES[name]() == "auto"
    for value in ("yes", "true", "1", "auto,always"):
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match="is not one of auto, ") as error:
            CHOICES[name]()
        assert f"{name}={value!r}" in str(error.value)


def test_a_key_is_what_the_command_has_written(monkeypatch, tmp_path):
    path = tmp_path / "key"
    monkeypatch.setenv("KVPATCH_SIDE_CHANNEL_KEY", str(path))
    with pytest.raises(SettingsError, match="is not a file that can be read: .*No such file"):
        settings.side_channel_key()

    assert CliRunner().invoke(app, ["key", str(path)]).exit_code == 0
    assert path.stat().st_mode & 0o077 == 0
    key = settings.side_channel_key()
    assert (len(key), key) == (40, path.read_text().strip())
    assert CliRunner().invoke(app, ["key", str(path)]).exit_code == 2
    assert settings.side_channel_key() == key, "a second one is not written over it"

    for wrong in (key[:-1], f"{key}0", f"{key[:-1]}~"):
        path.write_text(wrong)
        with pytest.raises(SettingsError, match="is not a file with a key in it"):
            settings.side_channel_key()
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(SettingsError, match="is not a file that can be read"):
        settings.side_channel_key()


def test_a_variable_that_nobody_reads_is_named_with_the_nearest_real_one(monkeypatch):
    assert settings.complaints(()) == []
    for name in (*SIZES, *CHOICES):
        monkeypatch.setenv(name, "auto")
    assert settings.complaints(()) == []
    monkeypatch.setenv("KVPATCH_HOST_BUFER_BYTES", "1")
    (complaint,) = settings.complaints(())
    assert complaint.endswith("did you mean KVPATCH_HOST_BUFFER_BYTES?")
