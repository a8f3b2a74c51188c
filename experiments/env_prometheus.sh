#!/usr/bin/env bash
# Unpacks Debian's Prometheus, without installing it, and prints the folder of its programs.
#
#   PATH="$PATH:$(experiments/env_prometheus.sh)" python -m pytest tests/contract/test_dashboard.py
#
# One that is on the path already is taken. Otherwise it needs apt-get and dpkg, some 20 MB of
# download, and lies in .cache/prometheus then.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$root/.cache/prometheus"

if program="$(command -v prometheus)"; then
    dirname "$program"
    exit
fi
mkdir -p "$root/.cache"
exec 9>"$root/.cache/prometheus.lock"
flock 9
if [[ ! -x "$folder/usr/bin/prometheus" ]]; then
    echo "prometheus: unpacking it in $folder" >&2
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    # Who may not do that finds what was listed last.
    apt-get update -qq >&2 || true
    # As root it would say that nobody else may write to that folder.
    (cd "$work" && apt-get -o APT::Sandbox::User=root download -qq prometheus >&2)
    rm -rf "$folder"
    dpkg --extract "$work"/prometheus_*.deb "$folder"
fi
echo "$folder/usr/bin"
