# shellcheck shell=bash
# For the experiments that run a command of kvpatch's; sourced.
#
#   run_cli COMMAND [--release RELEASE] [OPTIONS]
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
    local here release python
    here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
    release="$(release_of "$@")"
    python="$("$here/env.sh" ${release:+"$release"})"
    if ! "$python" -c "import kvpatch" 2>/dev/null; then
        export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
    fi
    exec "$python" -m kvpatch.cli "$@"
}
