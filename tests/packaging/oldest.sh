#!/usr/bin/env bash
# Plays the ledger, and a few pairs of the newest release, with the oldest packages that setup.cfg allows
# and the oldest NIXL that is supported: their classes and signatures are not the newest ones'.
#
#   tests/packaging/oldest.sh
#
# The packages lie before the environment's own, for these tests alone. About two minutes.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$("$root/experiments/env.sh")"
oldest="$(mktemp -d)"
trap 'rm -rf "$oldest"' EXIT
nixl=1.0.0

say() { echo "oldest packages: $*" >&2; }

mapfile -t needed < <(sed -n '/^install_requires/,/^$/s/^ *\([a-z]*\)>=\(.*\)$/\1==\2/p' "$root/setup.cfg")
if ((${#needed[@]} == 0)); then
    say "expected packages with their least versions under install_requires in setup.cfg, found none"
    exit 1
fi
say "${needed[*]} nixl==$nixl"
install() { "$python" -m pip install -qq --disable-pip-version-check --target "$oldest" "$@" >&2; }
install "${needed[@]}"
install --no-deps "nixl==$nixl" "nixl-cu12==$nixl"

export PYTHONPATH="$oldest:$root"
cd "$root"
"$python" - "$nixl" "${needed[@]}" <<'END'
import importlib, importlib.metadata, pkgutil, sys

from packaging.version import Version

nixl, *needed = sys.argv[1:]
for package in (f"nixl=={nixl}", *needed):
    name, _, expected = package.partition("==")
    found = importlib.metadata.version(name)
    if Version(found) != Version(expected):
        sys.exit(f"expected {package}, found {found}")
import kvpatch

for module in pkgutil.walk_packages(kvpatch.__path__, "kvpatch."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
END
"$python" -m pytest -q tests/patching/test_ledger.py
KVPATCH_TEST_RELEASES=newest "$python" -m pytest -q -n 2 --dist loadscope \
    tests/lab/test_like_pairs.py tests/lab/test_unlike_engines.py -k "pair_is_identical or spoilt"
