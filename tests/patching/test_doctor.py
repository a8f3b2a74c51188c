"""``kvpatch doctor`` and the command itself, each in a process of its own, on stand-in releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpatch.core import settings
from kvpatch.core.releases import FACTS, RELEASES
from kvpatch.core.version import __version__

from .standin import REPOSITORY, write_tree

_NEWEST = FACTS[RELEASES[-1]]
_WITHOUT_TYPER = "import sys; sys.modules['typer'] = None; sys.argv[0] = 'kvpatch'\n"
_MAIN = "from kvpatch.__main__ import main; main()"


def _run(code: list[str], path: str, environment: dict[str, str]) -> tuple[int, str, str]:
    dropped = ("KVPATCH", "KVCACHED", "VLLM_PLUGINS")
    kept = {n: v for n, v in os.environ.items() if not any(word in n for word in dropped)}
    done = subprocess.run(
        [sys.executable, *code],
        env={**kept, "PYTHONPATH": path, "COLUMNS": "500", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def _doctor(tree: Path, *options: str, **environment: str) -> tuple[int, str]:
    path = os.pathsep.join([str(tree), str(REPOSITORY)])
    status, out, _ = _run(["-m", "kvpatch", "doctor", *options], path, environment)
    return status, out


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("tree"), _NEWEST, _NEWEST.release)


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({}, 0, "kvpatch works here"),
        ({"VLLM_PLUGINS": "lora,kvpatch"}, 0, "kvpatch works here"),
        ({"VLLM_PLUGINS": "lora"}, 1, "set VLLM_PLUGINS=lora,kvpatch"),
        ({"VLLM_PLUGINS": ""}, 1, "set VLLM_PLUGINS=kvpatch"),
        ({"ENABLE_KVPATCH": ""}, 1, "set ENABLE_KVPATCH=true"),
        ({"ENABLE_KVPATCH": "yes"}, 1, "ENABLE_KVPATCH='yes' is neither true"),
        ({"KVPATCH_STAGING_BYTES": "256M"}, 1, "KVPATCH_STAGING_BYTES='256M' is not a whole"),
        ({"KVPATCH_ALLOWED_PEERS": "10.0.0.0/99"}, 1, "KVPATCH_ALLOWED_PEERS"),
        ({"KVPATCH_GENERATION": "g9999"}, 1, "g9999"),
    ],
)
def test_the_last_line_is_the_verdict(tree, environment, status, words):
    found, out = _doctor(tree, **{"ENABLE_KVPATCH": "true", **environment})

    last = out.splitlines()[-1]
    assert words in last
    assert found == status
    assert last.startswith("kvpatch works here" if status == 0 else "kvpatch does not work here: ")


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["describe", "--", "vllm", "serve"]])
def test_half_a_minute_is_announced_beside_the_output(tree, arguments):
    path = os.pathsep.join([str(tree), str(REPOSITORY)])
    _, out, err = _run(["-m", "kvpatch", *arguments], path, {})

    assert err.startswith("importing the installed vLLM, up to half a minute")
    assert "importing" in err and "importing" not in out


def test_a_drifted_release_does_not_work(tmp_path):
    drifted = write_tree(tmp_path, _NEWEST, _NEWEST.release, leave_out="register_kv_caches")

    status, out = _doctor(drifted, "--json", ENABLE_KVPATCH="true")

    found = json.loads(out)
    assert (status, found["healthy"]) == (1, False)
    assert any("register_kv_caches" in problem for problem in found["problems"])


def test_two_problems_are_both_in_the_verdict(tree):
    _, out = _doctor(tree, VLLM_PLUGINS="lora")

    assert "ENABLE_KVPATCH" in out.splitlines()[-1] and "VLLM_PLUGINS" in out.splitlines()[-1]


def test_wrong_arguments_are_status_2(tree):
    assert _doctor(tree, "--no-such-option")[0] == 2


def test_every_variable_with_a_wrong_value_is_named(monkeypatch):
    taken_as_they_are = {
        settings.ALLOWED_PEERS,  # read with the addresses, above
        settings.DISABLE,
        settings.GENERATION,
    }
    names = {v for n, v in vars(settings).items() if n.isupper() and str(v).startswith("KVPATCH_")}
    names.add(settings.ENABLE)
    for name in names:
        monkeypatch.setenv(name, "no such value")

    found = {error.partition("=")[0] for error in settings.errors()}

    assert found == names - taken_as_they_are


@pytest.mark.parametrize("arguments", [["doctor"], ["-h"], []])
def test_without_its_extra_the_command_says_what_to_install(arguments):
    code = ["-c", _WITHOUT_TYPER + _MAIN, *arguments]

    status, out, err = _run(code, str(REPOSITORY), {})

    assert (status, out) == (2, "")
    assert err == "error: the command needs typer: pip install 'kvpatch[cli]'\n"


@pytest.mark.parametrize("before", ["", _WITHOUT_TYPER])
def test_the_version_needs_no_extra(before):
    status, out, _ = _run(["-c", before + _MAIN, "--version"], str(REPOSITORY), {})

    assert (status, out) == (0, f"kvpatch {__version__}\n")


def test_short_help():
    status, out, _ = _run(["-m", "kvpatch", "-h"], str(REPOSITORY), {})

    assert status == 0 and "doctor" in out and "verify" in out
