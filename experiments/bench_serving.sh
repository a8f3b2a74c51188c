#!/usr/bin/env bash
# Times to first token of heterogeneous pairs of real engines, beside a like pair of stock's.
#
#   experiments/bench_serving.sh                       all pairs, 20 minutes
#   experiments/bench_serving.sh --pairs like,32-128   some
#   experiments/bench_serving.sh --help                all options
#
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"

run_module experiments.bench_serving "$@"
