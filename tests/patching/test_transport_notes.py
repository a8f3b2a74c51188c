"""The warning about kvcached's memory: once, on a GPU, for the releases it is true of."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvpatch.kvcached import transports

ON_A_GPU = {"layers.0": SimpleNamespace(device=SimpleNamespace(type="cuda"))}
ON_THE_HOST = {"layers.0": SimpleNamespace(device=SimpleNamespace(type="cpu"))}


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    transports._warn.cache_clear()
    monkeypatch.delenv("UCX_TLS", raising=False)


def _said(monkeypatch, caplog, version, *registrations):
    monkeypatch.setattr(transports, "kvcached_version", lambda: version)
    with caplog.at_level(logging.WARNING, logger="kvpatch"):
        for kv_caches in registrations:
            transports.note_transport(kv_caches)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("version", ["0.1.6", None])
def test_is_said_once_with_what_to_set(monkeypatch, caplog, version):
    (said,) = _said(monkeypatch, caplog, version, ON_A_GPU, ON_A_GPU)

    assert "ENABLE_KVCACHED=false" in said
    assert "UCX_TLS=^ib,cuda_ipc" in said


@pytest.mark.parametrize(
    ("version", "kv_caches"), [("0.1.6", ON_THE_HOST), ("9.0", ON_A_GPU), ("0.1.6", {})]
)
def test_is_not_said_where_it_is_not_known_to_be_true(monkeypatch, caplog, version, kv_caches):
    assert _said(monkeypatch, caplog, version, kv_caches) == []


@pytest.mark.parametrize(
    ("count", "transports"),
    [
        *((1, one) for one in ("", "all", "^ib", "tcp,cuda", "sm,cuda_ipc", "^gdr_copy")),
        *(
            (0, one)
            for one in ("tcp,cuda_copy", "self,sm,tcp", "^cuda_ipc", "^ib,cuda_ipc", "^cuda")
        ),
    ],
)
def test_is_said_where_nvlink_would_be_used(monkeypatch, caplog, count, transports):
    monkeypatch.setenv("UCX_TLS", transports)

    assert len(_said(monkeypatch, caplog, "0.1.6", ON_A_GPU)) == count
