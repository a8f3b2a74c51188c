#!/usr/bin/env bash
# The main example: P and D of different block sizes, layouts or ranks, stock beside kvpatch on D alone.
#
#   experiments/heterogeneous.sh                        the whole table, most of an hour on 2 cores
#   experiments/heterogeneous.sh --rows 128-32,32-128   some rows
#   experiments/heterogeneous.sh --write                the whole table, and its data in docs/data
#   experiments/heterogeneous.sh --list                 the names of all rows
#   experiments/heterogeneous.sh --help                 all options
#
# In the rows host-* P and D send KV through host buffers, an eighth of their caches: kvpatch is on P
# too there, and "stock" is a stock D that reads P's buffer.
#
# Real engines on CPU with tiny random models in float32; greedy tokens and cache bytes are held
# against one single engine. Exit status 0 only when every row is identical with kvpatch and every
# cache that was spoiled on purpose was noticed.
#
# Makes its own environment first; experiments/env.sh says how and which variables steer it.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=experiments/run_cli.sh
source "$here/run_cli.sh"

run_module experiments.heterogeneous "$@"
