"""Takes out of a folder of packages what a run on a GPU never loads, of NIXL's above all.

    python experiments/gpu/slim.py SITE

NIXL's wheel has a plugin for each transport, with its libraries; reads between two processes need
UCX's alone.
"""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

_UNUSED = ("nixl_ep", "nixl_ep_cu12", "nixl_ep_cu13", "nixl_cu12", "include", "bin", "pkgconfig")
_PLUGIN = "libplugin_UCX.so"
#: UCX's own plugins.
_TRANSPORTS = ("libuct_cuda", "libucm_cuda", "libuct_cma", "libucm", "libuct_xpmem", "libuct_knem")
#: Of a 64-bit ELF file.
_DYNAMIC, _NEEDED = 6, 1


def needed(path: Path) -> list[str]:
    """The libraries that a library asks for by name."""
    data = path.read_bytes()
    if data[:4] != b"\x7fELF":
        return []
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + n * size) for n in range(count)]
    found = []
    for section in sections:
        if section[1] != _DYNAMIC:
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 16):
            tag, value = struct.unpack_from("<qQ", data, at)
            if tag == _NEEDED:
                end = data.index(b"\0", strings + value)
                found.append(data[strings + value : end].decode())
    return found


def main(site: Path) -> None:
    """Removes, and says how much is left."""
    for name in _UNUSED:
        shutil.rmtree(site / name, ignore_errors=True)
    folders = [site / "nixl_cu13.libs", site / ".nixl_cu13.mesonpy.libs"]
    every = {path.name: path for top in folders for path in top.rglob("*") if path.is_file()}
    keep = [*(site / "nixl_cu13").glob("*.so")]
    for path in every.values():
        of_ucx = path.parent.name == "ucx" and path.name.startswith(_TRANSPORTS)
        if path.name == _PLUGIN or of_ucx:
            keep.append(path)
    seen: set[Path] = set()
    while keep:
        path = keep.pop()
        if path not in seen:
            seen.add(path)
            keep += [every[name] for name in needed(path) if name in every]
    before = sum(path.stat().st_size for path in every.values())
    for path in set(every.values()) - seen:
        path.unlink()
    for path in [*site.rglob("__pycache__")]:
        shutil.rmtree(path)
    after = sum(path.stat().st_size for path in seen & set(every.values()))
    print(f"NIXL's libraries: {before >> 20} MiB, of them {after >> 20} kept")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
