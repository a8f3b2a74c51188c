"""Refuses to register kvcached's memory on a device where a network card would keep its pages.

kvcached maps other pages under addresses that are registered. At registration every place
holds one shared page of zeros, and that is what a card reads and writes from then on, or the
transfer ends with an error. Nothing tells a worker's connector when a page is mapped, so
that there is no later moment at which to register.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpatch.connector.local.recurrent_state import tensors_of
from kvpatch.core import settings
from kvpatch.core.errors import RegistrationRefused
from kvpatch.transfer.network_cards import active_ports, beside_ucx, ports_in_play

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
    on_device = {device for device in _device_types(kv_caches) if device != "cpu"}
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
    ports = ports_in_play(active_ports(), settings.ucx_transports(), settings.ucx_net_devices())
    if ports:
        raise RegistrationRefused(
            f"kvcached's memory on {', '.join(sorted(on_device))} is to be registered where UCX "
            f"may use {', '.join(map(str, ports))}: a network card keeps the pages that are there "
            "at registration, all of them kvcached's page of zeros, and kvcached maps others "
            "later. Expected no card in UCX's choice, found "
            f"UCX_TLS={settings.ucx_transports() or 'all'} and "
            f"UCX_NET_DEVICES={settings.ucx_net_devices() or 'all'}",
            f"set UCX_TLS=^ib, or UCX_NET_DEVICES to Ethernet interfaces alone, or {_OTHERWISE}",
        )


def _device_types(kv_caches: Mapping[str, Any]) -> Iterator[str]:
    for cache in kv_caches.values():
        for tensor in tensors_of(cache):
            yield str(tensor.device.type)
