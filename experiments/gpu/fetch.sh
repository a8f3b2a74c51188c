#!/usr/bin/env bash
# Makes .gpukit: what a GPU machine without a network lacks. Run it where pip works, in minutes.
#
#   experiments/gpu/fetch.sh [RELEASE ...]
#
# RELEASE    vLLM releases to play, by default 0.33.0, 0.32.0 and 0.28.0
#
# The machine is taken for one with CPython 3.12, torch with CUDA 13, transformers, numpy, rich, typer, pytest and
# hypothesis. What these need beside them is in packages.txt, for that Python, whatever runs here. The trees of
# vLLM's Python come from tests/releases. Some 25 MB, left out of git; the checkout itself travels beside it.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
here="$root/experiments/gpu"
python="${KVPATCH_PYTHON:-$("$root/experiments/env.sh")}"
releases=("${@:-0.33.0}")
[[ $# -gt 0 ]] || releases=(0.33.0 0.32.0 0.28.0)
kit="$root/.gpukit" work="$root/.cache/gpukit"
mkdir -p "$kit" "$work"

if ! cmp -s "$here/packages.txt" "$work/made_from"; then
    tags=(--only-binary=:all: --python-version 3.12 --implementation cp --no-deps --platform any)
    for libc in 39 35 34 31 28 27 24 17 12 5; do tags+=(--platform "manylinux_2_${libc}_x86_64"); done
    tags+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    rm -rf "$work/site"
    "$python" -m pip install -qq --no-compile --target "$work/site" "${tags[@]}" -r "$here/packages.txt"
    "$python" "$here/slim.py" "$work/site"
    tar -C "$work/site" -cJf "$work/site.tar.xz" .
    cp "$here/packages.txt" "$work/made_from"
fi
cp "$work/site.tar.xz" "$kit/site.tar.xz"

cd "$root"
trees="$("$python" - "${releases[@]}" <<'PYTHON'
import sys

from tests.releases.cache import cache_root
from tests.releases.fetch import fetch

fetch(sys.argv[1:])
print(cache_root())
PYTHON
)"
# Files of one name one behind the other: releases differ little.
(cd "$trees" && find "${releases[@]}" -type f -not -name '*.pyc' -not -name '*.so' | sort -t/ -k2) |
    XZ_OPT="-6 --lzma2=preset=6,dict=64MiB" tar -C "$trees" -cJf "$kit/trees.tar.xz" -T -
du -h "$kit"/*
