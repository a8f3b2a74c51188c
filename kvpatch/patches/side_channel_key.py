"""Handshakes under a key: strangers on the side channel get no answer, and end nothing.

Why:
    Who reaches P's port gets P's metadata, with which NIXL reads P's whole KV cache. One odd
    message ends P's listener. ZMQ has a protocol with keys, and the release does not use it.
Where:
    Both sides, wherever the release makes a socket of the side channel.
How:
    `KVPATCH_SIDE_CHANNEL_KEY` names a file with a key, which `kvpatch key FILE` writes. The
    sockets speak CURVE with that key. D and P without the same key refuse one another, and D's
    log says why. `KVPATCH_SIDE_CHANNEL_PLAIN=true` talks to engines without the key as well,
    while it is rolled out. NIXL's own connections stay without a key.
Upstream:
    Nothing known.
Remove when:
    The release has a key for its side channel.
"""

from __future__ import annotations

from typing import Any

from kvpatch.core import seams, settings
from kvpatch.core.errors import SettingsError
from kvpatch.core.ledger import Patch, Site, Switch, Wrapper
from kvpatch.core.releases import ReleaseFacts


def _open(wrapped: Any, instance: Any, socket_type: int, addr: str) -> Any:
    from kvpatch.peer.side_channel_key import side_channel_socket  # what is off is not imported

    return side_channel_socket(socket_type, addr)


def _sites(facts: ReleaseFacts) -> dict[Site, Wrapper]:
    return dict.fromkeys(seams.side_channel_sockets(facts), _open)


def _state() -> str:
    if not settings.side_channel_key():
        return "off"
    import zmq

    if not zmq.has("curve"):
        raise SettingsError(
            f"this pyzmq was built without CURVE, which {settings.SIDE_CHANNEL_KEY} needs",
            f"install pyzmq's own wheel, or unset {settings.SIDE_CHANNEL_KEY}",
        )
    return "on"


PATCH = Patch(
    slug="side_channel_key",
    wire_affecting=True,
    sites=_sites,
    document=__doc__,
    switch=Switch(settings.SIDE_CHANNEL_KEY, _state),
)
