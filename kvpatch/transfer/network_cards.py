"""The network cards that UCX may register memory with, by the machine's cards and by UCX_*.

A card reads and writes the physical pages that were there when memory was registered; UCX's
other transports go by virtual address at each transfer. What cannot be told counts as a card.
Pure but for :func:`active_ports`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
