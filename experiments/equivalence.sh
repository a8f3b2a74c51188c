#!/usr/bin/env bash
# The main job: do two engines that hand a prompt's KV cache over answer like one engine?
#
#   experiments/equivalence.sh [--release RELEASE] [OPTIONS OF kvpatch verify]
#   experiments/equivalence.sh --help
#
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_cli verify "$@"
