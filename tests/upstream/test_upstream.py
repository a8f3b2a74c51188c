"""A share of vLLM's own NIXL tests with kvpatch on: those files that take seconds, and pass whole.

``experiments/upstream_tests.sh`` runs all of them, without kvpatch too, and compares.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.upstream_tests import UNIT_TESTS, Record, run_tests, source_of

pytestmark = pytest.mark.upstream

_ROOT = Path(__file__).resolve().parents[2]
_RELEASE = "0.32.0"
#: Of that release, by file.
_TESTS = {
    "test_nixl_desc_geometry.py": 220,
    "test_nixl_push_connector.py": 92,
    "test_tp_mapping.py": 26,
    "test_remote_decode_lifecycle.py": 4,
    "test_remote_prefill_lifecycle.py": 16,
}
_ONE = "test_nixl_desc_geometry.py::test_hetero_ppl_with_block_size_ratio[5]"


@pytest.fixture(scope="module")
def source() -> Path:
    return source_of(_RELEASE, _ROOT / ".cache" / f"upstream-{_RELEASE}")


def _run(source: Path, folder: Path, tests: list[str], *options: str) -> Record:
    # The conftest of all of vLLM's tests, which these do without, imports more than vLLM needs.
    options = ("--confcutdir", str(UNIT_TESTS), *options)
    named = [str(UNIT_TESTS / test) for test in tests]
    return run_tests(source, folder / "results.json", named, *options, kvpatch=True)


def test_what_passes_on_stock_passes_with_kvpatch(source: Path, tmp_path: Path) -> None:
    record = _run(source, tmp_path, list(_TESTS))

    assert "unlike_engines" in record.applied
    assert set(record.results.values()) == {"passed"}, record.reasons
    by_file = {file: sum(file in test for test in record.results) for file in _TESTS}
    assert by_file == _TESTS


def test_a_broken_kvpatch_is_noticed(source: Path, tmp_path: Path) -> None:
    record = _run(source, tmp_path, [_ONE], "--break-kvpatch")

    (result,) = record.results.values()
    assert "failed" in result and "BrokenOnPurpose" in result
