"""Where kvcached's memory on a device is refused because a network card could register it.

The cards are files of the kind that the kernel has in /sys/class/infiniband; nothing here has
been near a card.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpatch.core.errors import RegistrationRefused, SettingsError
from kvpatch.kvcached import transports
from kvpatch.kvcached.transports import (
    Port,
    active_ports,
    beside_ucx,
    ports_in_play,
    refuse_cards,
)

PORTS = (Port("mlx5_0", "1", "InfiniBand"), Port("mlx5_1", "1", "Ethernet"))
VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "KVPATCH_KVCACHED_CARDS")


def _tensor(device):
    return SimpleNamespace(device=SimpleNamespace(type=device))


ON_A_GPU = {"layers.0": _tensor("cuda"), "layers.1": _tensor("cuda")}
WITH_STATE = {"layers.0": [_tensor("cuda"), _tensor("cuda")]}
IN_HOST_MEMORY = {"layers.0": _tensor("cpu"), "layers.1": [_tensor("cpu")]}
UCX = ["UCX"]


def _card(root: Path, name: str, **ports: str) -> None:
    for number, state in ports.items():
        port = root / name / "ports" / number.removeprefix("port")
        port.mkdir(parents=True)
        port.joinpath("state").write_text(f"{state}\n")
        port.joinpath("link_layer").write_text("InfiniBand\n")


class TestPorts:
    def test_no_cards_without_their_folder(self, tmp_path):
        assert active_ports(tmp_path / "infiniband") == ()
        assert active_ports(tmp_path) == ()

    def test_active_ports_alone(self, tmp_path):
        _card(tmp_path, "mlx5_0", port1="4: ACTIVE", port2="1: DOWN")
        _card(tmp_path, "mlx5_1", port1="2: INIT")
        _card(tmp_path, "mlx5_2", port1="3: ARMED")

        (found,) = active_ports(tmp_path)

        assert found == Port("mlx5_0", "1", "InfiniBand")
        assert str(found) == "mlx5_0:1 (InfiniBand)"

    def test_a_port_that_does_not_say_counts(self, tmp_path):
        (tmp_path / "efa_0" / "ports" / "1").mkdir(parents=True)

        assert list(map(str, active_ports(tmp_path))) == ["efa_0:1"]


class TestTransports:
    @pytest.mark.parametrize(
        "transports",
        (None, "", "all", "^all", "ib", "rc", "rc_x", "rc_verbs", "ud", "dc", "dc_mlx5", "srd")
        + ("tcp,cuda,rc", "tcp,ud:aux", "rdmacm,tcp", r"\rc_mlx5", "gga", "mlx5", "tcp,nonsense")
        # UD is left to wire others up, and whatever a later UCX has.
        + ("^rc", "^rc,ud,dc", "^tcp", "^", "^mlx5", "^ ib", r"^\ib", "^rc_verbs,ud_verbs"),
    )
    def test_cards_are_in(self, transports):
        assert ports_in_play(PORTS, transports, None) == PORTS

    @pytest.mark.parametrize(
        "transports",
        ("^ib", "^ib,cuda_ipc", "^cuda_ipc,ib", "tcp", "self,sm,tcp", "tcp,cuda", "cuda_copy,tcp")
        + ("self,shm,tcp,cuda,gdr_copy", r"\tcp,\cuda_copy", "tcp,rocm", "tcp,,sm"),
    )
    def test_cards_are_out(self, transports):
        assert ports_in_play(PORTS, transports, None) == ()


class TestDevices:
    @pytest.mark.parametrize(
        ("devices", "chosen"),
        [
            (None, PORTS),
            ("", PORTS),
            ("all", PORTS),
            ("eth0,all", PORTS),
            ("eth0", ()),
            ("eth0,bond0.12,lo", ()),
            ("mlx5_0:1", PORTS[:1]),
            ("mlx5_0", PORTS[:1]),
            ("eth0, mlx5_1:1", PORTS[1:]),
            ("mlx5_0:2", ()),
            ("mlx5_10:1", ()),
            ("mlx5_[0-2]", PORTS),
            ("mlx5_*", PORTS),
            ("eth[0-3]", ()),
            ("^mlx5_0", PORTS),
            ("^mlx5_0:1,mlx5_1:1", PORTS),
            ("^eth0", PORTS),
        ],
    )
    def test_those_that_are_named(self, devices, chosen):
        assert ports_in_play(PORTS, None, devices) == chosen
        assert ports_in_play(PORTS, "^ib", devices) == ()


def test_what_is_ucx():
    assert beside_ucx(["UCX", "LIBFABRIC", "UCX_MO", "GDS"]) == ("LIBFABRIC", "GDS")
    assert beside_ucx(("UCX",)) == beside_ucx(()) == ()


class TestRefusal:
    @pytest.fixture(autouse=True)
    def _two_cards(self, monkeypatch):
        monkeypatch.setattr(transports, "active_ports", lambda: PORTS)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize("kv_caches", [ON_A_GPU, WITH_STATE, IN_HOST_MEMORY | ON_A_GPU])
    @pytest.mark.parametrize("backends", [UCX, ()])
    def test_names_cards_and_what_to_set(self, kv_caches, backends):
        with pytest.raises(RegistrationRefused) as refused:
            refuse_cards(backends, kv_caches)

        for word in (
            "mlx5_0:1 (InfiniBand), mlx5_1:1 (Ethernet)",
            "UCX_TLS=all",
            "UCX_TLS=^ib",
            "KVPATCH_HOST_BUFFER=always",
            "KVPATCH_KVCACHED_CARDS=trust",
        ):
            assert word in str(refused.value)

    def test_host_memory_is_none_of_its_business(self):
        refuse_cards(UCX, IN_HOST_MEMORY)
        refuse_cards(["LIBFABRIC"], IN_HOST_MEMORY)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("UCX_TLS", "^ib"),
            ("UCX_TLS", "tcp,cuda_copy"),
            ("UCX_NET_DEVICES", "eth0"),
            ("KVPATCH_KVCACHED_CARDS", "trust"),
        ],
    )
    def test_each_way_out(self, monkeypatch, name, value):
        monkeypatch.setenv(name, value)

        refuse_cards(UCX, ON_A_GPU)

    def test_no_cards(self, monkeypatch):
        monkeypatch.setattr(transports, "active_ports", tuple)

        refuse_cards(UCX, ON_A_GPU)

    def test_a_setting_that_helps_nothing_is_shown(self, monkeypatch):
        monkeypatch.setenv("UCX_TLS", "^rc,ud")
        monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_1:1")

        with pytest.raises(RegistrationRefused) as refused:
            refuse_cards(UCX, ON_A_GPU)

        assert "found UCX_TLS=^rc,ud and UCX_NET_DEVICES=mlx5_1:1" in str(refused.value)
        assert "mlx5_0" not in str(refused.value)

    @pytest.mark.parametrize("backends", [["LIBFABRIC"], ["UCX", "GDS"]])
    def test_another_backend_is_refused_without_a_card(self, monkeypatch, backends):
        monkeypatch.setattr(transports, "active_ports", tuple)
        monkeypatch.setenv("UCX_TLS", "^ib")

        with pytest.raises(RegistrationRefused, match=backends[-1]) as refused:
            refuse_cards(backends, ON_A_GPU)
        assert '"backends": ["UCX"]' in str(refused.value)

        monkeypatch.setenv("KVPATCH_KVCACHED_CARDS", "trust")
        refuse_cards(backends, ON_A_GPU)

    def test_trust_is_spelled_out(self, monkeypatch):
        monkeypatch.setenv("KVPATCH_KVCACHED_CARDS", "true")

        with pytest.raises(SettingsError, match="is not one of refuse, trust"):
            refuse_cards(UCX, ON_A_GPU)


# --- the warning about NVLink: once, and where it is true ---------------------------------


def _said(monkeypatch, caplog, version, *registrations):
    transports._warn.cache_clear()
    monkeypatch.setattr(transports, "kvcached_version", lambda: version)
    with caplog.at_level(logging.WARNING, logger="kvpatch"):
        for kv_caches in registrations:
            transports.note_transport(kv_caches)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("version", ["0.1.6", None])
def test_a_warning_is_said_once_with_what_to_set(monkeypatch, caplog, version):
    monkeypatch.delenv("UCX_TLS", raising=False)

    (said,) = _said(monkeypatch, caplog, version, ON_A_GPU, ON_A_GPU)

    assert "ENABLE_KVCACHED=false" in said
    assert "UCX_TLS=^ib,cuda_ipc" in said


@pytest.mark.parametrize(
    ("version", "kv_caches", "devices", "count"),
    [
        ("0.1.6", IN_HOST_MEMORY, "", 0),
        ("9.0", ON_A_GPU, "", 0),
        ("0.1.6", {}, "", 0),
        *(("0.1.6", ON_A_GPU, d, 1) for d in ("", "all", "^ib", "tcp,cuda", "sm,cuda_ipc")),
        ("0.1.6", ON_A_GPU, "^gdr_copy", 1),
        *(("0.1.6", ON_A_GPU, d, 0) for d in ("tcp,cuda_copy", "self,sm,tcp", "^cuda_ipc")),
        *(("0.1.6", ON_A_GPU, d, 0) for d in ("^ib,cuda_ipc", "^cuda")),
    ],
)
def test_a_warning_is_said_where_nvlink_would_be_used(
    monkeypatch, caplog, version, kv_caches, devices, count
):
    monkeypatch.setenv("UCX_TLS", devices)

    assert len(_said(monkeypatch, caplog, version, kv_caches)) == count
