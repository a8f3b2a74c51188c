"""A fork of the engines' ancestor is to everyone the process that was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc"),
]

_ROOT = Path(__file__).resolve().parents[2]
_AS_ENGINES_ARE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

#: Spawns a child, which tells who it is; the test's own lines follow.
_SCRIPT = """
import json, multiprocessing, os, signal, sys, time

def child(pipe, end):
    signal.signal(signal.SIGUSR1, lambda *_: pipe.send("USR1"))
    pipe.send({"pid": os.getpid(), "group": os.getpgrp(), "folder": os.getcwd(),
               "is_shared": "xml.dom.minidom" in sys.modules, "argv": sys.argv,
               "variable": os.environ.get("OF_THE_PARENT")})
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "wait":
        time.sleep(0.2)
        pipe.recv()
    sys.exit(end)

def spawned(end):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs, end))
    process.start()
    theirs.close()
    return process, ours, ours.recv()

def is_there(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

if __name__ == "__main__":
    os.environ["OF_THE_PARENT"] = "its"
    answer = {}
"""


def _play(folder: Path, lines: str, **variables: str) -> tuple[dict[str, Any], str]:
    """What a script with these lines answers, and what the ancestor says at its end."""
    script = folder / "script.py"
    body = "\n".join(f"    {line}" for line in lines.strip().splitlines())
    script.write_text(f"{_SCRIPT}{body}\n    print(json.dumps(answer))\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.serving.engine_ancestor"),
            *("--imports", "xml.dom.minidom", sys.executable, str(script)),
        ],
        env={**os.environ, **_AS_ENGINES_ARE, **variables},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_it_goes_on_where_the_other_was_started(tmp_path: Path) -> None:
    found, said = _play(
        tmp_path,
        """
os.chdir(os.path.dirname(__file__))
process, pipe, answer = spawned(3)
process.join()
answer |= {"known_as": process.pid, "status": process.exitcode, "our_group": os.getpgrp()}
""",
    )
    assert found.pop("pid") != found.pop("known_as")
    assert found.pop("group") == found.pop("our_group")
    assert found == {
        "folder": str(tmp_path),
        "is_shared": True,
        "argv": [str(tmp_path / "script.py")],
        "variable": "its",
        "status": 3,
    }
    assert "engine ancestor: 1 processes were forked\n" in said


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("process, pipe, seen = spawned('kill')", -9),
        ("process, pipe, seen = spawned('wait'); os.kill(seen['pid'], signal.SIGTERM)", -15),
        ("process, pipe, seen = spawned('wait'); process.terminate()", -15),
        ("process, pipe, seen = spawned('wait'); process.kill()", -9),
        ("process, pipe, seen = spawned('wait'); pipe.send('go'); pipe.close()", 1),
    ],
)
def test_it_ends_as_the_fork_does_and_the_fork_with_it(
    lines: str, expected: int, tmp_path: Path
) -> None:
    found, _ = _play(
        tmp_path,
        f"""
{lines}
process.join(20)
answer["status"] = process.exitcode
until = time.monotonic() + 20
while is_there(seen["pid"]) and time.monotonic() < until:
    time.sleep(0.01)
answer["is_there"] = is_there(seen["pid"])
""",
    )
    assert found == {"status": expected, "is_there": False}


def test_with_other_variables_it_starts_by_itself(tmp_path: Path) -> None:
    """What the libraries have read when they were imported cannot be read again."""
    found, said = _play(
        tmp_path,
        """
process, pipe, answer = spawned(0)
process.join()
answer["is_known"] = process.pid == answer["pid"]
""",
        OMP_NUM_THREADS="2",
    )
    assert (found["is_known"], found["is_shared"]) == (True, False)
    assert "0 processes were forked; 1 started by themselves" in said
    assert "OMP_NUM_THREADS is 2, and 1 here" in said
