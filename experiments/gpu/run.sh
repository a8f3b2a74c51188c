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
        tar -C "$site" -xJf "$root/.gpukit/site.tar.xz" &
        mkdir -p "$env/trees" && tar -C "$env/trees" -xJf "$root/.gpukit/trees.tar.xz"
        wait
        cp "$root/experiments/gpu/stand_ins/sitecustomize.py" "$site/"
        touch "$env/made"
    fi
    export KVPATCH_PYTHON="$env/bin/python" KVPATCH_TEST_CACHE="$env/trees"
fi
export PYTHONPATH="$root" PYTHONUNBUFFERED=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
exec "$KVPATCH_PYTHON" -m experiments.gpu "$@"
