#!/usr/bin/env bash
# The main job: do two engines that hand a prompt's KV cache over answer like one engine?
#
#   experiments/equivalence.sh [--release RELEASE] [OPTIONS OF kvpatch verify]
#   experiments/equivalence.sh --help
#
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

release=""
previous=""
for argument in "$@"; do
    case "$argument" in
        --release=*) release="${argument#--release=}" ;;
        *) [[ "$previous" == --release ]] && release="$argument" ;;
    esac
    previous="$argument"
done

python="$("$here/env.sh" ${release:+"$release"})"
if ! "$python" -c "import kvpatch" 2>/dev/null; then
    export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$python" -m kvpatch.cli verify "$@"
