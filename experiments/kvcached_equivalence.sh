#!/usr/bin/env bash
# P and D with kvcached and without, on a machine with CUDA: greedy tokens, cache bytes, layouts.
#
#   experiments/kvcached_equivalence.sh                                all pairs
#   experiments/kvcached_equivalence.sh --rows contiguous,split-half   some pairs
#   experiments/kvcached_equivalence.sh --list | --help                anywhere, without CUDA
#   experiments/kvcached_equivalence.sh --release 0.28.0               vLLM release; this by default
#   experiments/kvcached_equivalence.sh --on-cpu                       anywhere, CUDA stood in for
#
# Makes its own environment first, in .cache/env-cuda-RELEASE, and says what it installs. Needs a GPU
# and, to build kvcached, the CUDA toolkit (nvcc) and a C++ compiler. KVPATCH_PYTHON names a Python
# that has vLLM for CUDA, NIXL, kvcached and kvpatch already: nothing is installed then.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/.." && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"

KVCACHED_RELEASE=0.1.6
release="$(release_of "$@")"
release="${release:-0.28.0}"
env="$root/.cache/env-cuda-$release"

say() { echo "kvcached equivalence: $*" >&2; }

run() {
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    exec "$1" "$here/kvcached_equivalence.py" "${@:2}"
}

only_talks() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            --help | -h | --list) return 0 ;;
        esac
    done
    return 1
}

if [[ -n "${KVPATCH_PYTHON:-}" ]]; then
    run "$KVPATCH_PYTHON" "$@"
fi
if ! only_talks "$@" && [[ " $* " == *" --on-cpu "* ]]; then
    python="$("$here/env.sh")"
    run "$python" "$@"
fi
if only_talks "$@"; then
    for python in "$env/bin/python" "$root"/.cache/env-*/bin/python python3; do
        if "$python" -c "import packaging, typer, wrapt" 2>/dev/null; then
            run "$python" "$@"
        fi
    done
    say "--help and --list need a Python with packaging, typer and wrapt: set KVPATCH_PYTHON"
    exit 2
fi
if ! nvidia-smi -L >/dev/null 2>&1; then
    say "this machine has no CUDA device (nvidia-smi finds none), and kvcached has memory on one" \
        "only: nothing was installed. Run it where there is one; --on-cpu runs anywhere"
    exit 2
fi
if [[ ! -e "$env/complete" ]]; then
    if ! command -v nvcc >/dev/null && [[ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]]; then
        say "kvcached $KVCACHED_RELEASE is built from source and there is no nvcc: install the CUDA" \
            "toolkit and put nvcc on PATH, or set CUDA_HOME, or KVPATCH_PYTHON to a Python that has it"
        exit 2
    fi
    say "will install into $env, about 12 GB: vllm==$release with its torch for CUDA, nixl," \
        "kvcached==$KVCACHED_RELEASE (built here), and this checkout of kvpatch"
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    install() { "$env/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2; }
    install "vllm==$release" nixl setuptools wheel
    install "vllm==$release" "kvcached==$KVCACHED_RELEASE" --no-build-isolation
    install --editable "$root[cli,serve]"
    "$env/bin/python" -c "import vllm, nixl, kvcached.vmm_ops, kvpatch.tools.cli" >&2
    touch "$env/complete"
fi
run "$env/bin/python" "$@"
