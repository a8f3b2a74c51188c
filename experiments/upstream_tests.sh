#!/usr/bin/env bash
# Runs vLLM's own unit tests of the NixlConnector twice, without kvpatch and with it, and compares
# the result of every test. The tests come from the release's source distribution.
#
#   experiments/upstream_tests.sh [--release RELEASE] [--negative-control] [--files NAME,NAME]
#   experiments/upstream_tests.sh --help
#
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"

release="$(release_of "$@")"
python="$("$here/env.sh" ${release:+"$release"})"

# What vLLM's test tree imports and vLLM itself does not bring, as module:distribution.
missing=()
for need in pytest:pytest pytest_asyncio:pytest-asyncio pytest_timeout:pytest-timeout \
    tblib:tblib ray:ray rich:rich; do
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('${need%%:*}') is None)" ||
        missing+=("${need##*:}")
done
if ((${#missing[@]})); then
    echo "upstream tests: installing ${missing[*]}" >&2
    "$python" -m pip install --quiet --disable-pip-version-check "${missing[@]}" >&2
fi

PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$here/upstream_tests.py" "$@"
