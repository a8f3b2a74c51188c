# shellcheck shell=bash
# For the experiments that run a command of kvpatch's, or a module or script of their own; sourced.
#
#   run_cli COMMAND [--release RELEASE] [OPTIONS]
#   run_module MODULE [--release RELEASE] [OPTIONS]
#   run_script SCRIPT [OPTIONS]
#
# Makes the environment for that release first (experiments/env.sh), then replaces the shell.

# What --release names among the arguments; nothing where it is not there.
release_of() {
    local release="" previous="" argument
    for argument in "$@"; do
        case "$argument" in
            --release=*) release="${argument#--release=}" ;;
            *) [[ "$previous" == --release ]] && release="$argument" ;;
        esac
        previous="$argument"
    done
    echo "$release"
}

run_cli() {
    run_module kvpatch.tools.cli "$@"
}

run_module() {
    local release
    release="$(release_of "${@:2}")"
    _run_python "$release" -m "$@"
}

run_script() {
    _run_python "" "$@"
}

_run_python() {
    local here python release="$1"
    shift
    here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
    python="$("$here/env.sh" ${release:+"$release"})"
    # The project's own lab (experiments/engines) is in the checkout only.
    export PYTHONPATH="$(cd "$here/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" "$@"
}
