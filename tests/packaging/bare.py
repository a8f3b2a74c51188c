"""In an environment with neither vllm nor torch: importing and enabling kvpatch raises nothing."""

from __future__ import annotations

import importlib.util
import os
import sys

_HEAVY = ("vllm", "torch", "nixl", "numpy", "typer", "rich")


def main() -> str:
    """What is wrong; empty where nothing is."""
    there = [name for name in _HEAVY if importlib.util.find_spec(name)]
    if there:
        return f"this environment has {', '.join(there)}"
    before = set(sys.modules)
    import kvpatch
    import kvpatch.auto  # the gate is off: nothing happens

    roots = {name.partition(".")[0] for name in set(sys.modules) - before}
    if roots - sys.stdlib_module_names != {"kvpatch"}:
        return f"expected an import that needs Python alone, found {sorted(roots)}"
    os.environ["ENABLE_KVPATCH"] = "true"
    kvpatch.plugin.load()
    status = kvpatch.status()
    if "vLLM is not installed" not in status.problem:
        return f"expected a status that says that vLLM is missing, found {status}"
    kvpatch.disable()
    return ""


if __name__ == "__main__":
    sys.exit(main() or 0)
