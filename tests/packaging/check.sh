#!/usr/bin/env bash
# Builds the sdist and the wheel as a release would, and holds them against what they promise: twine's
# check, every tracked module and no other, an environment with neither vllm nor torch in which
# `import kvpatch` works and `kvpatch doctor` says what is missing.
#
#   tests/packaging/check.sh
#
# Of what git tracks, in the state in which it lies here. Nothing is left in the checkout.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
tools="$("$root/experiments/env_tools.sh")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

say() { echo "packages: $*" >&2; }

copy_tracked_files() {
    mkdir "$work/source"
    git -C "$root" ls-files -z | (cd "$root" && xargs -0 ls -d 2>/dev/null) |
        tar --create --directory "$root" --files-from=- | tar --extract --directory "$work/source"
}

build() {
    # Without an environment of its own for each of the two: what they need is in the tools'.
    "$tools" -m build --no-isolation --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || {
        cat "$work/build.log" >&2
        return 1
    }
    "$tools" -m twine check --strict "$work"/dist/* >&2
}

install() { "$work/env/bin/python" -m pip install -qq --disable-pip-version-check "$@" >&2; }

# Away from the checkout, so that what is imported is what was installed.
in_environment() { (cd "$work/env" && env -u PYTHONPATH -u ENABLE_KVPATCH "$@"); }

say "building"
copy_tracked_files
build
"$tools" "$root/tests/packaging/contents.py" "$work/source" "$work"/dist/*

say "installing into an empty environment"
"$tools" -m venv "$work/env"
install "$work"/dist/*.whl
in_environment bin/python "$root/tests/packaging/bare.py"

install "$(echo "$work"/dist/*.whl)[cli]"
in_environment bin/kvpatch --help >/dev/null
if in_environment bin/kvpatch doctor --json >"$work/doctor.json"; then
    say "kvpatch doctor: expected status 1 without vLLM, found 0"
    exit 1
fi
grep -q "vLLM is not installed" "$work/doctor.json" || {
    say "kvpatch doctor does not say that vLLM is not installed:"
    cat "$work/doctor.json" >&2
    exit 1
}
say "planning a pair there"
in_environment bin/python - <<'END'
import json, pathlib
pathlib.Path("m").mkdir()
sizes = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 8}
sizes |= {"hidden_size": 256, "dtype": "bfloat16"}
pathlib.Path("m/config.json").write_text(json.dumps(sizes))
for side, tokens in (("p", 128), ("d", 32)):
    transfer = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    lines = [f"model: m", f"block-size: {tokens}", f"kv-transfer-config: '{transfer}'"]
    pathlib.Path(f"{side}.yaml").write_text("\n".join(lines))
END
status=0
in_environment bin/kvpatch plan p.yaml d.yaml --release 0.32.0 --json >"$work/plan.json" || status=$?
if [[ $status != 1 ]] || ! grep -q '"outcome": "refused at the first request"' "$work/plan.json"; then
    say "kvpatch plan: expected status 1 and a pair that stock refuses, found $status:"
    cat "$work/plan.json" >&2
    exit 1
fi
say "sdist and wheel are as promised"
