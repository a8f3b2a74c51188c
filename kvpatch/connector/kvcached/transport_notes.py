"""What kvcached's memory means for the transport that NIXL will find, said once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from kvpatch.core import settings

_LOG = logging.getLogger("kvpatch.registration")

#: Releases whose source asks ``cuMemCreate`` for no shareable handle.
_WITHOUT_HANDLES = ("0.1.2", "0.1.3", "0.1.4", "0.1.5", "0.1.6")


#: UCX's names for the transport over NVLink.
_OVER_NVLINK = frozenset(("cuda", "cuda_ipc", r"\cuda_ipc"))


def note_transport(kv_caches: Mapping[str, Any]) -> None:
    """Warns, once a process, where kvcached's tensors on a GPU will travel slowly.

    Not where UCX_TLS leaves out what is slow with them: that was chosen.
    """
    devices = {getattr(getattr(cache, "device", None), "type", "") for cache in kv_caches.values()}
    if "cuda" in devices and has_cuda_ipc(settings.ucx_transports()):  # ROCm's name too
        _warn(kvcached_version())


def has_cuda_ipc(transports: str | None) -> bool:
    """Whether ``UCX_TLS`` leaves the transport between GPUs of one machine in."""
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
