"""The transports that may move kvcached's memory: refused beside network cards, noted on GPUs.

kvcached maps other pages under addresses that are registered. At registration every place
holds one shared page of zeros, and that is what a card reads and writes from then on, or the
transfer ends with an error. Nothing tells a worker's connector when a page is mapped, so
that there is no later moment at which to register.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.transfer.network_cards import active_ports, beside_ucx, ports_in_play
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
    names = {name for name in (transports or "").removeprefix("^").split(",") if name}
    if not names or "all" in names:
        return True
    is_named = not names.isdisjoint(_OVER_NVLINK)
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
