#!/usr/bin/env bash
# Faults while real engines serve: stale blocks by a lease of 2 s, P held up, kill -9 of P and of D
# with a restart under the same engine id. Is an answer wrong, is each failure counted once?
#
#   experiments/drill.sh [--pairs stock,d-alone,both,both-64-32] [--scenes stale,link,...]
#   experiments/drill.sh --requests 5000 --json FILE --check     as many for each pair, an hour or more
#   experiments/drill.sh --help
#
# Real engines on CPU with a tiny random model; every answer is held against one single engine.
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_module experiments.drill "$@"
