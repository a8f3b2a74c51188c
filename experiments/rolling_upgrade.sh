#!/usr/bin/env bash
# A rolling upgrade: real engines of one vLLM release are replaced by ones of another while requests run.
#
#   experiments/rolling_upgrade.sh                                0.31.0 to 0.32.0, both orders, both ways
#   experiments/rolling_upgrade.sh --old 0.32.0 --new 0.31.0      back again
#   experiments/rolling_upgrade.sh --stock --json FILE --check    stock engines too; exit 1 unless all is well
#   experiments/rolling_upgrade.sh --help                         what is played and counted
#
# Real engines on CPU with a tiny random model; every answer is held against one single engine. Makes
# an environment for each release first, about 4 GB; experiments/env.sh says how and which variables
# steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_module experiments.rolling_upgrade "$@"
