"""The peers that a client may make D connect to: the list in ``KVPATCH_ALLOWED_PEERS``.

A name is compared with names and an address with networks, and nothing is looked up: what a
name stands for when it is checked need not be what it stands for when it is connected to. So
another writing of an address (``127.1``, ``0x7f.1``) is a name, which is not listed. IPv4
addresses in IPv6's clothes (``::ffff:10.0.0.1``) are IPv4's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from kvpatch.core import settings
from kvpatch.core.errors import SettingsError

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

_MAPPED = IPv6Network("::ffff:0:0/96")
_NAME = re.compile(r"(\*\.)?[0-9A-Za-z_]([0-9A-Za-z_.-]*[0-9A-Za-z_])?|\*")
#: A host in brackets or without colons, and what may follow it.
_WITH_PORTS = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5})(?:-(\d{1,5}))?)?")


@dataclass(frozen=True)
class Entry:
    """An entry of the list.

    Attributes:
        network: of addresses; None for a name.
        name: in lower case; ``*`` stands for any host, ``*.`` in front for any below it.
    """

    network: Network | None
    name: str
    first_port: int
    last_port: int

    def allows(self, host: str | Address, port: int) -> bool:
        if not self.first_port <= port <= self.last_port:
            return False
        if self.name == "*":
            return True
        if not isinstance(host, str):
            return self.network is not None and host in self.network
        if self.name.startswith("*."):
            return host.endswith(self.name[1:])
        return bool(self.name) and host == self.name


@dataclass(frozen=True)
class AllowedPeers:
    """The entries of the list; an empty list allows any peer, as stock vLLM does."""

    entries: tuple[Entry, ...]

    def allows(self, host: str, port: int) -> bool:
        found = _host_of(host)
        return not self.entries or any(entry.allows(found, port) for entry in self.entries)


def allowed_peers() -> AllowedPeers:
    """Returns the peers that the variable lists; raises what :func:`parse` does."""
    return parse(settings.allowed_peers())


@lru_cache(maxsize=8)
def parse(entries: tuple[str, ...]) -> AllowedPeers:
    """Reads a list of networks and names, each with a port or a range of ports, or with any.

    Raises:
        SettingsError: an entry is none of these.
    """
    return AllowedPeers(tuple(map(_entry, entries)))


def _entry(text: str) -> Entry:
    network = _network(text)
    if network is not None:  # an IPv6 network has colons of its own
        return Entry(network, "", 1, 65535)
    found = _WITH_PORTS.fullmatch(text)
    host = found.group(1) if found else ""
    network = _network(host.strip("[]"))
    is_name = network is None and _NAME.fullmatch(host) is not None
    first, last = _ports(found)
    if (network is None and not is_name) or not 1 <= first <= last <= 65535:
        raise SettingsError(
            f"{settings.ALLOWED_PEERS} has {text!r}, which is no network (10.0.0.0/8, fd00::/8), "
            "address or host name, with or without a port or ports (10.0.0.0/8:5600-5700, "
            "[fd00::/8]:5600, prefill-0:5600, *.prefill:5600, *:5600)",
            "set such ones, with commas between them",
        )
    return Entry(network, host.lower().rstrip(".") if is_name else "", first, last)


def _ports(found: re.Match[str] | None) -> tuple[int, int]:
    if found is None or found.group(2) is None:
        return 1, 65535
    first = int(found.group(2))
    return first, first if found.group(3) is None else int(found.group(3))


def _network(text: str) -> Network | None:
    try:
        found = ip_network(text, strict=False)
    except ValueError:
        return None
    if isinstance(found, IPv6Network) and found.subnet_of(_MAPPED):
        base = found.network_address.ipv4_mapped
        return IPv4Network((base, found.prefixlen - 96)) if base is not None else found
    return found


def _host_of(host: str) -> str | Address:
    """An address, out of brackets and IPv6's clothes; or a name in lower case."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ip_address(bare)
    except ValueError:
        return bare.lower().rstrip(".")
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or address
    return address
