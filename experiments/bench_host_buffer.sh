#!/usr/bin/env bash
# What a host buffer costs in real engines: time to first token against the direct path, saving
# against prefill, and host memory against vLLM's own mirror of the cache.
#
#   experiments/bench_host_buffer.sh [--requests 60] [--tokens 800] [--json FILE]
#
# Two pairs of engines on CPU, side by side and by turns; wants the machine to itself, about 9 GiB
# of its memory, and a few minutes.
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_script "$here/bench_host_buffer.py" "$@"
