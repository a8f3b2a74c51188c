#!/usr/bin/env bash
# Makes the environment of a device whose tensors have no storage, once, and prints the path of its
# Python: torch_xla on its own CPU device, over all else that experiments/env.sh installs.
#
#   "$(experiments/env_xla.sh)" -m pytest -q tests/lab/test_xla.py
#
# The environment lies in .cache/env-xla and takes 6 GB: PyPI has no CPU build of this torch, and the
# CUDA build is not imported without the libraries that it was linked with. No GPU is needed.
#
#   KVPATCH_XLA_PYTHON  a Python that has all of it already: printed, nothing is installed
#   KVPATCH_PYTHON      as for experiments/env.sh: what the environment is made over
set -euo pipefail

if [[ -n "${KVPATCH_XLA_PYTHON:-}" ]]; then
    echo "$KVPATCH_XLA_PYTHON"
    exit 0
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
base="$("$root/experiments/env.sh")"
env="$root/.cache/env-xla"
python="$env/bin/python"
complete="$env/complete"

# torch_xla's, and what that torch's libraries name among those that they need.
packages=(
    torch==2.9.1
    torch-xla==2.9.0
    nvidia-cublas-cu12==12.8.4.1
    nvidia-cuda-cupti-cu12==12.8.90
    nvidia-cuda-runtime-cu12==12.8.90
    nvidia-cudnn-cu12==9.10.2.21
    nvidia-cufft-cu12==11.3.3.83
    nvidia-cufile-cu12==1.13.1.3
    nvidia-curand-cu12==10.3.9.90
    nvidia-cusparse-cu12==12.5.8.93
    nvidia-cusparselt-cu12==0.7.1
    nvidia-nccl-cu12==2.27.5
    nvidia-nvjitlink-cu12==12.8.93
    nvidia-nvshmem-cu12==3.3.20
)

make_environment() {
    if ! "$base" -c "import pytest, filelock, gguf, diskcache"; then
        echo "env-xla: $base lacks what the tests need: run tests/run.sh once" >&2
        exit 2
    fi
    echo "env-xla: making it in $env, a few minutes and about 6 GB" >&2
    rm -rf "$env"
    "$base" -m venv "$env"
    "$python" -m pip install -qq --disable-pip-version-check --no-deps "${packages[@]}" >&2
    # Behind its own packages, so that its torch comes first.
    "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth"
    echo "env-xla: checking it" >&2
    PJRT_DEVICE=CPU "$python" -c "import torch_xla, nixl, pytest; torch_xla.device()" >&2
    touch "$complete"
}

mkdir -p "$root/.cache"
exec 9>"$root/.cache/env-xla.lock"
flock 9
if [[ ! -e "$complete" ]]; then
    make_environment
fi
echo "$python"
