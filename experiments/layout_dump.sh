#!/usr/bin/env bash
# Prints the geometry of an engine's KV cache: tensors, and the planes in them.
#
#   experiments/layout_dump.sh [--json] [URL]
#
# URL is a running server's, e.g. http://127.0.0.1:8000, that was started with
#   VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls kvpatch.verify.probe.CacheProbe
# Without it a tiny engine is started for the purpose.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

python="$("$here/env.sh")"
if ! "$python" -c "import kvpatch" 2>/dev/null; then
    export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$python" -m kvpatch.verify.layout "$@"
