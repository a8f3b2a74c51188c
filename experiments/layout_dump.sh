#!/usr/bin/env bash
# Prints the geometry of an engine's KV cache: tensors, and the planes in them.
#
#   experiments/layout_dump.sh [--json] [URL]
#
# URL is a running server's, e.g. http://127.0.0.1:8000, that was started with this checkout on
# PYTHONPATH, VLLM_SERVER_DEV_MODE=1 and
#   --worker-extension-cls experiments.engines.lab_probe.LabProbe
# Without it a tiny engine is started for the purpose.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"
run_script "$here/layout_dump.py" "$@"
