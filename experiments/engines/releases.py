"""Engines of other releases than the one that an experiment runs in: each has an environment."""

from __future__ import annotations

import os
import subprocess
from functools import cache

from packaging.version import Version

from experiments.harness import ROOT
from kvpatch.core.errors import BadOptions
from kvpatch.core.installed import installed_vllm


@cache
def python_of(release: str | None) -> str:
    """The Python that has a release of vLLM; empty for the one that this runs in.

    Its environment is made where it is missing (``experiments/env.sh``): minutes and about 4 GB.

    Raises:
        BadOptions: it cannot be made; the reason is on stderr.
    """
    if release is None or Version(installed_vllm().version).public == release:
        return ""
    script = str(ROOT / "experiments" / "env.sh")
    # KVPATCH_PYTHON names one environment, which has one release.
    inherited = {name: text for name, text in os.environ.items() if name != "KVPATCH_PYTHON"}
    made = subprocess.run(
        [script, release], env=inherited, stdout=subprocess.PIPE, text=True, check=False
    )
    if made.returncode:
        raise BadOptions(
            f"no environment for vLLM {release}: {script} ended with an error",
            "look at what the script says",
        )
    return made.stdout.strip()
