"""The transports that may move kvcached's memory: refused beside network cards, noted on GPUs.

kvcached maps other pages under addresses that are registered. At registration every place
holds one shared page of zeros, and that is what a card reads and writes from then on, or the
transfer ends with an error. Nothing tells a worker's connector when a page is mapped, so
that there is no later moment at which to register. UCX's transports without a card go by virtual
address at each transfer. What cannot be told counts as a card.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.worker.recurrent_state import tensors_of

_LOG = logging.getLogger("kvpatch.registration")

#: Releases whose source asks ``cuMemCreate`` for no shareable handle.
_WITHOUT_HANDLES = ("0.1.2", "0.1.3", "0.1.4", "0.1.5", "0.1.6")
#: UCX's names for the transport over NVLink.
_OVER_NVLINK = frozenset(("cuda", "cuda_ipc", r"\cuda_ipc"))
_OTHERWISE = (
    "KVPATCH_HOST_BUFFER=always on P and D, which copies blocks into host memory that is "
    "registered once, or KVPATCH_KVCACHED_CARDS=trust where such reads are known to be right"
)


_DEVICES = Path("/sys/class/infiniband")
#: The number in a port's ``state``; UCX uses no port in any other.
_ACTIVE = "4"
_ALL = "all"
#: UCX's name for all transports of cards: to leave them out, and those that wire them up.
_CARDS = "ib"
#: UCX's transports that no card has, and its names for some of them. gdr_copy pins pages too, and
#: cannot pin memory that was made without gpuDirectRDMACapable, as kvcached's is (gdrcopy #257).
_WITHOUT_CARDS = frozenset(
    (
        *("self", "tcp", "sm", "shm", "mm", "posix", "sysv", "xpmem", "knem", "cma"),
        *("cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
        *("rocm", "rocm_copy", "rocm_ipc", "rocm_gdr"),
    )
)
#: NIXL's backends that are UCX; of any other nobody here knows how it registers memory.
_UCX = ("UCX", "UCX_MO")
_RANGE = re.compile(r"[\[*?]")


def refuse_cards(nixl_backends: Sequence[str], kv_caches: Mapping[str, Any]) -> None:
    """Refuses tensors of kvcached's that are to be registered as a device's memory.

    Host memory is none of kvcached's: a host buffer's, or a stand-in's.

    Raises:
        RegistrationRefused: with the cards that were found, and what to set.
    """
    tensors = (tensor for one in kv_caches.values() for tensor in tensors_of(one))
    on_device = {str(tensor.device.type) for tensor in tensors} - {"cpu"}
    if not on_device or settings.kvcached_cards() == "trust":
        return
    others = beside_ucx(nixl_backends)
    if others:
        raise RegistrationRefused(
            f"kvcached's memory on {', '.join(sorted(on_device))} is to be registered with NIXL's "
            f"{', '.join(others)}, and kvcached maps other pages under it later: expected UCX "
            "alone, whose transports without a card go by address at each transfer, found a "
            "backend that may keep the pages of the registration",
            f'set "backends": ["UCX"] in kv_connector_extra_config, or {_OTHERWISE}',
        )
    transports, devices = settings.variable("UCX_TLS"), settings.variable("UCX_NET_DEVICES")
    ports = ports_in_play(active_ports(), transports, devices)
    if ports:
        raise RegistrationRefused(
            f"kvcached's memory on {', '.join(sorted(on_device))} is to be registered where UCX "
            f"may use {', '.join(map(str, ports))}: a network card keeps the pages that are there "
            "at registration, all of them kvcached's page of zeros, and kvcached maps others "
            "later. Expected no card in UCX's choice, found "
            f"UCX_TLS={transports or 'all'} and UCX_NET_DEVICES={devices or 'all'}",
            f"set UCX_TLS=^ib, or UCX_NET_DEVICES to Ethernet interfaces alone, or {_OTHERWISE}",
        )


def note_transport(kv_caches: Mapping[str, Any]) -> None:
    """Warns, once a process, where kvcached's tensors on a GPU will travel slowly.

    Not where UCX_TLS leaves out what is slow with them: that was chosen.
    """
    devices = {getattr(getattr(cache, "device", None), "type", "") for cache in kv_caches.values()}
    if "cuda" in devices and has_cuda_ipc(settings.variable("UCX_TLS")):  # ROCm's name too
        _warn(kvcached_version())


def has_cuda_ipc(transports: str | None) -> bool:
    """True if ``UCX_TLS`` leaves the transport between GPUs of one machine in."""
    names = _names((transports or "").removeprefix("^"))
    if not names or _ALL in names:
        return True
    is_named = not _OVER_NVLINK.isdisjoint(names)
    return not is_named if (transports or "").startswith("^") else is_named


def kvcached_version() -> str | None:
    """The installed kvcached's; None where its metadata is not there."""
    try:
        return metadata.version("kvcached")
    except metadata.PackageNotFoundError:
        return None


@cache
def _warn(version: str | None) -> None:
    if version is not None and version not in _WITHOUT_HANDLES:
        return
    _LOG.warning(
        "kvcached %s makes memory without shareable handles: between GPUs of one machine UCX has "
        "no cuda_ipc for it and copies through the host (NIXL #1754: 0.3 GB/s where NVLink has "
        "200). Set ENABLE_KVCACHED=false on an engine that must send or receive over NVLink, or "
        "UCX_TLS=^ib,cuda_ipc where it need not (docs/explanation/kvcached.md)",
        version or "of an unknown version",
    )


@dataclass(frozen=True)
class Port:
    """A port of a card: InfiniBand, RoCE or EFA.

    Attributes:
        link: what the kernel calls its link layer; empty where it does not say.
    """

    device: str
    number: str
    link: str = ""

    def __str__(self) -> str:
        return f"{self.device}:{self.number}{f' ({self.link})' if self.link else ''}"


def active_ports(devices: Path = _DEVICES) -> tuple[Port, ...]:
    """Ports of the machine's cards that are up, or do not say so.

    Args:
        devices: where the kernel lists cards; without one it is not there.
    """
    return tuple(
        Port(path.parent.parent.name, path.name, _said(path / "link_layer"))
        for path in sorted(devices.glob("*/ports/*"))
        if _said(path / "state").partition(":")[0] in ("", _ACTIVE)
    )


def _said(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def ports_in_play(
    ports: Iterable[Port], transports: str | None, devices: str | None
) -> tuple[Port, ...]:
    """Returns the ports that UCX may use.

    Args:
        transports: ``UCX_TLS``; None where it is not set.
        devices: ``UCX_NET_DEVICES``, likewise.
    """
    if not has_cards_transports(transports):
        return ()
    return tuple(port for port in ports if _is_chosen(port, devices))


def has_cards_transports(transports: str | None) -> bool:
    """True if ``UCX_TLS`` leaves a transport in that a card has.

    A list that is negated leaves out what it names. ``ib`` alone is all of them: without ``ud``
    they are still wired up through it, and others come with UCX's releases.
    """
    names = _names((transports or "").removeprefix("^"))
    if not names or names[0] == _ALL:
        return True
    if (transports or "").startswith("^"):
        return _CARDS not in names
    # A backslash has UCX take the name for a transport's and no other.
    return any(name.removeprefix("\\") not in _WITHOUT_CARDS for name in names)


def _is_chosen(port: Port, devices: str | None) -> bool:
    names = _names(devices or "")
    # Older UCX takes a negated list for names, and chooses those after the first.
    if not names or _ALL in names or names[0].startswith("^"):
        return True
    return any(_may_be(name.strip(), port) for name in names)


def _may_be(name: str, port: Port) -> bool:
    full = f"{port.device}:{port.number}"
    pattern = _RANGE.search(name)
    if pattern:  # of numbers, in newer UCX
        return full.startswith(name[: pattern.start()])
    return name in (port.device, full)


def _names(listed: str) -> list[str]:
    return [name for name in listed.split(",") if name]


def beside_ucx(backends: Iterable[str]) -> tuple[str, ...]:
    """Returns the NIXL backends that are not UCX."""
    return tuple(backend for backend in backends if backend not in _UCX)
