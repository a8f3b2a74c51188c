"""P and D with kvcached and without, on a GPU; experiments/kvcached_equivalence.sh runs this.

Every pair serves the same prompts as one single engine without kvcached, greedily; the tokens are
compared one by one, the cache of every layer by SHA-256 over each head's bytes, at P and at D. The
layout of every engine's cache is written down, and must be the one that was asked for. A block of
D's cache is spoiled on purpose in each pair, and must be noticed. kvpatch is on D and, where P has
kvcached, on P.

--on-cpu serves some of the pairs without a GPU: real engines of vLLM 0.32 with kvcached's own view
code for 0.30, over host memory whose pages come and go with the blocks in use. Its compiled part
and its manager, which need CUDA, are stood in for; a page that is not there can be neither read nor
written, so that an engine that touches one ends.

Exit status: 0 every pair identical and every spoiled cache noticed, 1 not, 2 could not run,
128 + n stopped by signal n.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

from experiments.engines.kvcached_pairs import CPU_ROWS, ROWS
from experiments.engines.pairs import OPTIONS, choose
from experiments.harness import ROOT, importable_in_engines, options_of
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import require_release

_STAND_INS_RELEASE = "0.32.0"


def require_here() -> None:
    """Raise :class:`EngineFailed`, with what to do, where CUDA, vLLM, NIXL or kvcached is not."""
    driver = shutil.which("nvidia-smi") or "false"
    gpus = subprocess.run([driver, "-L"], capture_output=True, text=True, check=False)
    if gpus.returncode or not gpus.stdout.strip():
        raise EngineFailed(
            "this machine has no CUDA device (nvidia-smi finds none), and kvcached has memory on "
            "one only: run it where there is one; --on-cpu runs kvcached's own view code in host "
            "memory"
        )
    missing = [name for name in ("vllm", "nixl", "kvcached") if not importlib.util.find_spec(name)]
    if missing:
        raise EngineFailed(
            f"{sys.executable} has no {', '.join(missing)}: unset KVPATCH_PYTHON, so that "
            "kvcached_equivalence.sh makes an environment, or install vLLM for CUDA, nixl, and "
            "`pip install kvcached==0.1.6 --no-build-isolation`, which needs the CUDA toolkit"
        )
    import torch

    if not torch.cuda.is_available():
        raise EngineFailed(
            f"torch {torch.__version__} in {sys.executable} finds no CUDA device and nvidia-smi "
            "does: install a build of torch for CUDA, or set CUDA_VISIBLE_DEVICES"
        )


def bring_stand_ins() -> None:
    """Makes engines started from here find kvcached's source and the stand-in for CUDA.

    Raises:
        BadOptions: this is not the vLLM that the stand-ins are for.
    """
    require_release(_STAND_INS_RELEASE)
    from tests.releases import kvcached

    kvcached.fetch(kvcached.NEWEST)
    importable_in_engines(ROOT / "tests/serving/elastic")


def main() -> int:
    asked = options_of(
        __doc__,
        judged=False,
        rows=(None, "which pairs, by commas; all by default"),
        list=(False, "only name the pairs"),
        on_cpu=(False, "without a GPU: kvcached's view code, what needs CUDA stood in for"),
        stock=(False, "also serve each pair without kvpatch on D"),
        **OPTIONS,
    )
    with exit_statuses():
        rows = choose(asked.rows, CPU_ROWS if asked.on_cpu else ROWS)
        if asked.list:
            print("\n".join(row.name for row in rows))
            return 0
        if asked.on_cpu:
            bring_stand_ins()
        else:
            require_here()
            importable_in_engines()
        require_release(asked.release)
        from experiments.engines.report import all_passed, show_pairs  # which a list does without

        return 0 if all_passed(show_pairs(rows, asked, "kvcached", with_stock=asked.stock)) else 1


if __name__ == "__main__":
    sys.exit(main())
