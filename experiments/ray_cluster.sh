#!/usr/bin/env bash
# Decode engines whose ranks are Ray actors on two raylets of this machine: one with kvpatch's variables
# copied to them, one with these left behind.
#
#   experiments/ray_cluster.sh [--legacy] [--work-dir DIR]
#
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$("$here/env.sh")"
if ! "$python" -c "import ray" 2>/dev/null; then
    echo "ray cluster: installing ray" >&2
    "$python" -m pip install --quiet --disable-pip-version-check ray >&2
fi
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$here/ray_cluster.py" "$@"
