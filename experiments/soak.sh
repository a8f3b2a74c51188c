#!/usr/bin/env bash
# A host buffer under 2,000 requests over 16 connections, with clients that give up and a P that
# restarts: no wrong token, no host block left allotted, no growth of host memory.
#
#   experiments/soak.sh [--requests 2000] [--connections 16] [--seconds 3600] [--work-dir DIR]
#   experiments/soak.sh --help
#
# Real engines on CPU with a tiny random model; every answer is held against one single engine.
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_script "$here/soak.py" "$@"
