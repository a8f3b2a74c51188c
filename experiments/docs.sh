#!/usr/bin/env bash
# Builds the site of docs/ into .cache/site and fails where a page, a link or an anchor is missing.
#
#   experiments/docs.sh         builds it
#   experiments/docs.sh serve   shows it at localhost:8000, and again after each change
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$("$root/experiments/env_tools.sh")"
cd "$root"
# The theme's note about its successor is not this site's.
export NO_MKDOCS_2_WARNING=1
if [[ "${1:-}" == serve ]]; then
    exec "$python" -m mkdocs serve
fi
# Not --quiet: mkdocs then neither prints its warnings nor counts them.
exec "$python" -m mkdocs build --strict
