#!/usr/bin/env bash
# Makes the environment that builds the documentation and the packages, and prints its Python.
#
#   experiments/env_tools.sh
#
# The environment lies in .cache/env-tools: the extras `docs` and `package` of setup.cfg, some 80 MB,
# and neither vLLM nor torch. It is made anew when these change.
#
#   PYTHON    the Python to make it with, python3 by default
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
env="$root/.cache/env-tools"
# What these extras name, without kvpatch itself.
extras() {
    "${PYTHON:-python3}" - "$root/setup.cfg" "$@" <<'PYTHON'
import configparser
import sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
for extra in sys.argv[2:]:
    print(config["options.extras_require"][extra].strip())
PYTHON
}

mkdir -p "$root/.cache"
wanted="$(extras docs package)"
exec 9>"$root/.cache/env-tools.lock"
flock 9
if [[ "$(cat "$env/made_from" 2>/dev/null)" != "$wanted" ]]; then
    echo "env-tools: making it in $env" >&2
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    mapfile -t packages <<<"$wanted"
    "$env/bin/python" -m pip install -qq --disable-pip-version-check "${packages[@]}" >&2
    echo "$wanted" >"$env/made_from"
fi
echo "$env/bin/python"
