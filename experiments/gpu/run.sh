#!/usr/bin/env bash
# Plays stages on this machine's GPU (docs/evidence/gpu.md), with what fetch.sh has made.
#
#   experiments/gpu/run.sh [--device cpu] [--seconds 540] [STAGE ...]
#
# Results go to $OUT/gpu.json, what stages say to $OUT/logs.tar.gz. A GPU machine gets an environment of its own beside its Python, once.
#
#   KVPATCH_PYTHON    the Python of an environment that has all that is needed: nothing is unpacked
#   OUT               where results go, .cache/gpu by default
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
export OUT="${OUT:-$root/.cache/gpu}"
if [[ -z "${KVPATCH_PYTHON:-}" ]]; then
    base="${BASE_PYTHON:-python3}" env="${GPUKIT:-/tmp/kvpatch-gpukit}"
    if [[ ! -e "$env/made" ]]; then
        "$base" -m venv --without-pip "$env"
        site="$(echo "$env"/lib/python3*/site-packages)"
        "$base" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/machine.pth"
        # By Python: a machine may lack xz.
        unpack() { "$base" -m tarfile -e "$root/.gpukit/$1.tar.xz" "$2"; }
        unpack site "$site" &
        unpack trees "$env/trees"
        wait
        # Not as sitecustomize: Ubuntu's Python has one of its own, which comes first.
        cp "$root/experiments/gpu/stand_ins/missing_packages.py" "$site/"
        echo "import missing_packages" >"$site/missing_packages.pth"
        touch "$env/made"
    fi
    export KVPATCH_PYTHON="$env/bin/python" KVPATCH_TEST_CACHE="$env/trees"
fi
# Without NVLink UCX reads another process's memory by TCP, and not by cuda_ipc (NIXL #1097).
export UCX_CUDA_IPC_ENABLE_GET_ZCOPY="${UCX_CUDA_IPC_ENABLE_GET_ZCOPY:-on}"
export PYTHONPATH="$root" PYTHONUNBUFFERED=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
exec "$KVPATCH_PYTHON" -m experiments.gpu "$@"
