#!/usr/bin/env bash
# Loads that verify themselves, proven: thousands of good loads without a false alarm; wrong bytes
# on purpose, and who notices them; answers behind those that were noticed.
#
#   experiments/proof.sh --quick                        minutes: one pair, float32
#   experiments/proof.sh --json FILE --check            all of it, hours
#   experiments/proof.sh --model DIR ...                another model than a tiny random Llama
#   experiments/proof.sh --help
#
# Real engines on CPU; every answer that counts is held against one single engine's. Makes its own
# environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_module experiments.proof "$@"
